#include "brigade/checkpoint/tensor_files.h"

#include <ATen/TensorGeometry.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <string_view>
#include <system_error>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "brigade/checkpoint/safetensors.h"
#include "brigade/comm/agreement.h"
#include "brigade/comm/errors/error_texts.h"
#include "brigade/comm/group/group_collectives.h"
#include "brigade/comm/group/group_info.h"

namespace brigade {
namespace {

namespace fs = std::filesystem;

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using Json = nlohmann::json;

constexpr char kIndexKey[] = "brigade.shards";
constexpr char kAnotherModel[] = ".\nLoad a checkpoint of the same model.";

// Consecutive elements of a tensor in one file.
struct Chunk {
  int64_t file = 0;  // kFolder: the rank that writes it; kFile: 0
  int64_t begin = 0;
  int64_t numel = 0;  // > 0
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Chunk, file, begin, numel)

struct StoredTensor {
  std::string name;
  std::string dtype;  // as named by safetensors
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;  // define the element order
  std::vector<int> ranks;        // CheckpointTensor::ranks
  // This rank's chunk before the ranks exchange their tables; afterwards the
  // chunks of all ranks, ascending.
  std::vector<Chunk> chunks;

  c10::ScalarType scalar_type() const {
    return safetensors_dtype(dtype).value();
  }
  std::string form() const {
    return absl::StrCat(dtype, " of [", absl::StrJoin(shape, ", "), "]");
  }
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(StoredTensor, name, dtype, shape, strides,
                                   ranks, chunks)

struct StoredTensors {
  std::string id;  // random, new for each save
  int64_t world_size = 1;
  std::vector<StoredTensor> tensors;

  std::string shard_path(const std::string& folder, int64_t file) const {
    return fs::path(folder) / absl::StrCat("shard-", file, "-of-", world_size,
                                           ".", id, ".safetensors");
  }
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(StoredTensors, id, world_size, tensors)

std::vector<int64_t> c_strides(const std::vector<int64_t>& shape) {
  const at::DimVector strides = c10::contiguous_strides(shape);
  return {strides.begin(), strides.end()};
}

std::vector<Chunk> one_chunk(int64_t file, int64_t begin, int64_t numel) {
  if (numel == 0) return {};
  return {{file, begin, numel}};
}

// Describes the tensor as stored, with this rank's chunk.
StoredTensor stored_form(const CheckpointTensor& tensor, int64_t rank) {
  return {.name = tensor.name,
          .dtype = safetensors_dtype_name(tensor.held.scalar_type()),
          .shape = tensor.shape,
          .strides =
              tensor.strides.empty() ? c_strides(tensor.shape) : tensor.strides,
          .ranks = tensor.ranks,
          .chunks = one_chunk(rank, tensor.begin, tensor.held.numel())};
}

void check_chunks(const StoredTensor& tensor) {
  int64_t covered = 0;
  for (const Chunk& chunk : tensor.chunks) {
    TORCH_CHECK_VALUE(chunk.begin == covered && chunk.numel > 0,
                      "the chunks of tensor '", tensor.name,
                      "' are not consecutive");
    covered += chunk.numel;
  }
  const int64_t numel = c10::multiply_integers(tensor.shape);
  TORCH_CHECK_VALUE(covered == numel, "the chunks of tensor '", tensor.name,
                    "' have ", covered, " elements, expected ", numel);
}

// Returns the tensors of all ranks, largest element size first for alignment.
// Throws if the ranks' tables contradict each other.
std::vector<StoredTensor> merge(
    const std::vector<std::vector<StoredTensor>>& tables) {
  std::map<std::string, std::pair<StoredTensor, std::vector<int>>> by_name;
  for (size_t rank = 0; rank < tables.size(); ++rank) {
    for (const StoredTensor& own : tables[rank]) {
      auto& [first, holders] = by_name[own.name];
      if (holders.empty()) first = own;
      holders.push_back(static_cast<int>(rank));
      TORCH_CHECK_VALUE(own.ranks == first.ranks,
                        "expected each tensor on one mesh, found '", own.name,
                        "' on two.\nName parameters of different meshes "
                        "differently.");
      TORCH_CHECK_VALUE(
          own.form() == first.form() && own.strides == first.strides,
          "expected tensor '", own.name,
          "' with one dtype, shape and strides on all ranks, found ",
          first.form(), " with strides ", at::IntArrayRef(first.strides),
          " on rank ", holders.front(), " and ", own.form(), " with strides ",
          at::IntArrayRef(own.strides), " on rank ", rank);
      for (const Chunk& chunk : own.chunks) {
        const bool is_copy =
            std::ranges::any_of(first.chunks, [&](const Chunk& known) {
              return known.begin == chunk.begin && known.numel == chunk.numel;
            });
        if (!is_copy) first.chunks.push_back(chunk);
      }
    }
  }
  std::vector<StoredTensor> tensors;
  for (auto& [name, merged] : by_name) {
    auto& [tensor, holders] = merged;
    TORCH_CHECK_VALUE(
        holders.size() ==
            (tensor.ranks.empty() ? tables.size() : tensor.ranks.size()),
        "expected the same tensors on all ranks, found '", name, "' on ",
        describe_ranks(holders), " only");
    std::ranges::sort(tensor.chunks, {}, &Chunk::begin);
    check_chunks(tensor);
    tensors.push_back(std::move(tensor));
  }
  std::ranges::stable_sort(tensors, std::greater<>(),
                           [](const StoredTensor& tensor) {
                             return c10::elementSize(tensor.scalar_type());
                           });
  return tensors;
}

at::Tensor flat(const CheckpointTensor& tensor) {
  return tensor.held.detach().contiguous().view({-1});
}

std::span<const std::byte> bytes_of(const at::Tensor& contiguous) {
  return {static_cast<const std::byte*>(contiguous.const_data_ptr()),
          contiguous.nbytes()};
}

const CheckpointTensor* find(const std::vector<CheckpointTensor>& tensors,
                             const std::string& name) {
  const auto found = std::ranges::find(tensors, name, &CheckpointTensor::name);
  return found == tensors.end() ? nullptr : &*found;
}

constexpr char kDoing[] = "could not save or load a checkpoint with its peers";

// Collective. Returns each rank's table of the tensors that it holds.
std::vector<std::vector<StoredTensor>> gather_tables(const Group& group,
                                                     const std::string& own) {
  std::vector<int64_t> lengths =
      all_gather_ints(group, {static_cast<int64_t>(own.size())}, kDoing);
  std::vector<int64_t> words(std::ranges::max(lengths) / sizeof(int64_t) + 1);
  std::memcpy(words.data(), own.data(), own.size());
  const std::vector<int64_t> all = all_gather_ints(group, words, kDoing);
  std::vector<std::vector<StoredTensor>> tables;
  for (size_t rank = 0; rank < lengths.size(); ++rank) {
    const auto* const text =
        reinterpret_cast<const char*>(all.data() + rank * words.size());
    tables.push_back(Json::parse(text, text + lengths[rank]));
  }
  return tables;
}

// Returns all elements of a tensor on rank 0. Collective if other ranks hold
// some of them.
at::Tensor gather_elements(const Group& group, const StoredTensor& tensor,
                           const CheckpointTensor* own) {
  if (std::ranges::all_of(tensor.chunks,
                          [](const Chunk& chunk) { return chunk.file == 0; })) {
    return group->getRank() == 0 ? flat(*own) : at::Tensor();
  }
  const int64_t most = std::ranges::max(tensor.chunks, {}, &Chunk::numel).numel;
  // A rank without the tensor does not know the tensor's device.
  const at::Tensor sent = at::zeros(
      {most},
      at::TensorOptions(tensor.scalar_type()).device(control_device(*group)));
  if (own != nullptr) sent.narrow(0, 0, own->held.numel()).copy_(flat(*own));
  // As bytes: backends support few dtypes.
  const std::vector<at::Tensor> by_rank =
      all_gather_tensors(group, sent.view(at::kByte), kDoing);
  if (group->getRank() != 0) return {};
  std::vector<at::Tensor> pieces;
  for (const Chunk& chunk : tensor.chunks) {
    pieces.push_back(by_rank[chunk.file]
                         .view(tensor.scalar_type())
                         .narrow(0, 0, chunk.numel));
  }
  return at::cat(pieces);
}

void save_file(const Group& group, const std::vector<CheckpointTensor>& tensors,
               const StoredTensors& stored, const std::string& path,
               const CheckpointMetadata& metadata) {
  std::optional<SafetensorsWriter> writer;
  on_all_ranks(group, [&] {
    if (group->getRank() != 0) return;
    std::vector<SafetensorsEntry> entries;
    for (const StoredTensor& tensor : stored.tensors) {
      entries.push_back({tensor.name, tensor.scalar_type(), tensor.shape});
    }
    writer.emplace(path, entries, metadata);
  });
  // After a failed write this rank still joins the peers' all-gathers.
  std::exception_ptr failure;
  for (const StoredTensor& tensor : stored.tensors) {
    if (tensor.chunks.empty()) continue;
    const at::Tensor elements =
        gather_elements(group, tensor, find(tensors, tensor.name));
    if (!writer || failure) continue;
    try {
      writer->write(bytes_of(elements.as_strided(tensor.shape, tensor.strides)
                                 .contiguous()
                                 .cpu()));
    } catch (...) {
      failure = std::current_exception();
    }
  }
  on_all_ranks(group, [&] {
    if (failure) std::rethrow_exception(failure);
    if (writer) writer->finish();
  });
}

// Removes the shard files of other checkpoints. Ignores errors.
void remove_other_shards(const std::string& folder, const std::string& id) {
  std::vector<fs::path> others;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder)) {
    const std::string name = entry.path().filename();
    if (absl::StartsWith(name, "shard-") &&
        absl::StrContains(name, ".safetensors") &&
        !absl::StrContains(name, absl::StrCat(".", id, "."))) {
      others.push_back(entry.path());
    }
  }
  std::error_code ignored;
  for (const fs::path& other : others) fs::remove(other, ignored);
}

void save_folder(const Group& group,
                 const std::vector<CheckpointTensor>& tensors,
                 const StoredTensors& stored, const std::string& folder,
                 CheckpointMetadata metadata) {
  const int64_t rank = group->getRank();
  const std::string own_path = stored.shard_path(folder, rank);
  std::vector<SafetensorsEntry> entries;
  std::vector<const CheckpointTensor*> written;
  std::set<int64_t> files;
  for (const StoredTensor& tensor : stored.tensors) {
    for (const Chunk& chunk : tensor.chunks) {
      files.insert(chunk.file);
      if (chunk.file != rank) continue;
      written.push_back(find(tensors, tensor.name));
      entries.push_back({tensor.name, tensor.scalar_type(), {chunk.numel}});
    }
  }
  try {
    on_all_ranks(group, [&] {
      TORCH_CHECK_VALUE(!fs::exists(folder) || fs::is_directory(folder),
                        "checkpoint folder '", folder,
                        "' is a file.\nPass a folder.");
      fs::create_directories(folder);
      if (written.empty()) return;
      SafetensorsWriter writer(own_path, entries);
      for (const CheckpointTensor* tensor : written) {
        writer.write(bytes_of(flat(*tensor).cpu()));
      }
      writer.finish();
    });
    on_all_ranks(group, [&] {  // before the index is replaced
      if (rank != 0) return;
      for (const int64_t file : files) {
        TORCH_CHECK_VALUE(fs::exists(stored.shard_path(folder, file)),
                          "rank 0 does not see the file that rank ", file,
                          " wrote to '", folder,
                          "'.\nSave to a folder that all ranks share.");
      }
    });
  } catch (...) {
    std::error_code ignored;
    if (!written.empty()) fs::remove(own_path, ignored);
    throw;
  }
  on_all_ranks(group, [&] {
    if (rank != 0) return;
    metadata[kIndexKey] = Json(stored).dump();
    SafetensorsWriter(fs::path(folder) / "index.safetensors", {}, metadata)
        .finish();
    remove_other_shards(folder, stored.id);
  });
}

class StoredFiles {
 public:
  explicit StoredFiles(const std::string& path) : path_(path) {
    const bool is_folder = fs::is_directory(path);
    SafetensorsReader first(
        is_folder ? (fs::path(path) / "index.safetensors").string() : path);
    contents_.metadata = first.metadata();
    checksum_ = first.header_checksum();
    if (is_folder) {
      read_index(first.path());
    } else {
      for (const auto& [name, entry] : first.entries()) {
        stored_.tensors.push_back(
            {.name = name,
             .dtype = safetensors_dtype_name(entry.dtype),
             .shape = entry.shape,
             .strides = c_strides(entry.shape),
             .ranks = {},
             .chunks = one_chunk(0, 0, c10::multiply_integers(entry.shape))});
      }
      readers_.emplace(0, std::move(first));
    }
    for (const StoredTensor& tensor : stored_.tensors) {
      by_name_.emplace(tensor.name, &tensor);
      contents_.names.insert(tensor.name);
    }
  }

  const std::string& checksum() const { return checksum_; }
  const CheckpointContents& contents() const { return contents_; }

  // Opens and verifies the files with this rank's elements. Throws unless the
  // checkpoint has the tensor with this dtype and shape.
  void prepare(const CheckpointTensor& tensor) {
    const auto stored = by_name_.find(tensor.name);
    TORCH_CHECK_VALUE(stored != by_name_.end(), "'", path_, "' has no tensor '",
                      tensor.name, "'", kAnotherModel);
    const std::string found = stored->second->form();
    const std::string expected = stored_form(tensor, /*rank=*/0).form();
    TORCH_CHECK_VALUE(found == expected, "'", path_, "': tensor '", tensor.name,
                      "' is ", found, ", expected ", expected, kAnotherModel);
    for_each_piece(tensor, [&](const Chunk& chunk, int64_t, int64_t) {
      if (!readers_.contains(chunk.file)) {
        readers_.emplace(chunk.file, stored_.shard_path(path_, chunk.file));
      }
    });
  }

  // Fills `tensor.held`. REQUIRES: prepare(tensor) has returned.
  void read(const CheckpointTensor& tensor) {
    const StoredTensor& stored = *by_name_.at(tensor.name);
    const bool is_ordered = has_order_of(tensor);
    const int64_t begin = is_ordered ? tensor.begin : 0;
    at::Tensor run =
        at::empty({is_ordered ? tensor.held.numel()
                              : c10::multiply_integers(tensor.shape)},
                  tensor.held.options().device(at::kCPU));
    const auto element = static_cast<int64_t>(run.element_size());
    const std::span bytes(static_cast<std::byte*>(run.mutable_data_ptr()),
                          run.nbytes());
    for_each_piece(tensor,
                   [&](const Chunk& chunk, int64_t first, int64_t last) {
                     readers_.at(chunk.file)
                         .read(tensor.name, (first - chunk.begin) * element,
                               bytes.subspan((first - begin) * element,
                                             (last - first) * element));
                   });
    if (!is_ordered) {
      const at::Tensor ordered = at::empty_strided(
          stored.shape, stored_form(tensor, 0).strides, run.options());
      ordered.copy_(run.as_strided(stored.shape, stored.strides));
      run = ordered.as_strided({run.numel()}, {1})
                .narrow(0, tensor.begin, tensor.held.numel());
    }
    tensor.held.detach().copy_(run.view(tensor.held.sizes()));
  }

 private:
  void read_index(const std::string& path) {
    try {
      Json::parse(contents_.metadata.at(kIndexKey)).get_to(stored_);
      std::ranges::for_each(stored_.tensors, check_chunks);
    } catch (const std::exception&) {
      TORCH_CHECK_VALUE(false, path, ": is not an index of shards: ",
                        message_of(std::current_exception()),
                        "\nUse a folder written by save_checkpoint().");
    }
    contents_.metadata.erase(kIndexKey);
  }

  bool has_order_of(const CheckpointTensor& tensor) const {
    return stored_form(tensor, 0).strides == by_name_.at(tensor.name)->strides;
  }

  // Calls use(chunk, first, last) for the stored elements that `held` needs:
  // all elements if they are stored in another order.
  template <typename Use>
  void for_each_piece(const CheckpointTensor& tensor, const Use& use) const {
    const bool is_ordered = has_order_of(tensor);
    for (const Chunk& chunk : by_name_.at(tensor.name)->chunks) {
      int64_t first = chunk.begin;
      int64_t last = chunk.begin + chunk.numel;
      if (is_ordered) {
        first = std::max(first, tensor.begin);
        last = std::min(last, tensor.begin + tensor.held.numel());
      }
      if (first < last) use(chunk, first, last);
    }
  }

  const std::string path_;
  std::string checksum_;  // identifies the content
  CheckpointContents contents_;
  StoredTensors stored_;
  std::map<std::string_view, const StoredTensor*> by_name_;
  std::map<int64_t, SafetensorsReader> readers_;  // by file
};

}  // namespace

void on_all_ranks(const Group& group, const std::function<void()>& step,
                  const char* compared, const std::vector<std::string>& equal) {
  absl::Status status;
  try {
    step();
  } catch (...) {
    status = absl::InvalidArgumentError(message_of(std::current_exception()));
  }
  require_agreement(group, compared, equal, status);
}

void save_tensors(const Group& group,
                  const std::vector<CheckpointTensor>& tensors,
                  const std::string& path, CheckpointLayout layout,
                  CheckpointMetadata metadata) {
  const at::NoGradGuard no_grad;
  std::string own;
  std::vector<std::string> texts;
  const auto describe = [&] {
    Json table = Json::array();
    for (const CheckpointTensor& tensor : tensors) {
      table.push_back(stored_form(tensor, group->getRank()));
    }
    own = table.dump();
    for (const auto& [key, value] : metadata) {
      texts.push_back(absl::StrCat(key, ": ", value));
    }
  };
  on_all_ranks(group, describe, "metadata text", texts);
  std::random_device random;
  const int64_t id = all_gather_ints(
      group, {static_cast<int64_t>(uint64_t{random()} << 32 | random())},
      kDoing)[0];  // rank 0's
  const StoredTensors stored = {
      .id = absl::StrCat(absl::Hex(id, absl::kZeroPad16)),
      .world_size = group->getSize(),
      .tensors = merge(gather_tables(group, own))};
  if (layout == CheckpointLayout::kFolder) {
    save_folder(group, tensors, stored, path, std::move(metadata));
  } else {
    save_file(group, tensors, stored, path, metadata);
  }
}

CheckpointMetadata load_tensors(
    const Group& group, const std::string& path,
    const std::function<
        std::vector<CheckpointTensor>(const CheckpointContents&)>& choose) {
  const at::NoGradGuard no_grad;
  std::optional<StoredFiles> files;
  std::vector<CheckpointTensor> tensors;
  std::vector<std::string> checksum;
  const auto open = [&] {
    files.emplace(path);
    tensors = choose(files->contents());
    for (const CheckpointTensor& tensor : tensors) files->prepare(tensor);
    checksum = {"a checkpoint with checksum " + files->checksum()};
  };
  on_all_ranks(group, open, "checkpoint", checksum);
  on_all_ranks(group, [&] {
    try {
      for (const CheckpointTensor& tensor : tensors) files->read(tensor);
    } catch (const c10::Error& error) {
      TORCH_CHECK_VALUE(false, error.what_without_backtrace(),
                        "\nThe tensors are loaded in part; load a checkpoint "
                        "before any other use.");
    }
  });
  return files->contents().metadata;
}

}  // namespace brigade
