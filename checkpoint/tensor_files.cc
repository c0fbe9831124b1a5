#include "brigade/checkpoint/tensor_files.h"

#include <ATen/TensorGeometry.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <exception>
#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <string_view>
#include <system_error>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "brigade/comm/errors/error_texts.h"
#include "brigade/comm/errors/peer_error.h"
#include "brigade/comm/group/group_info.h"

namespace brigade {
namespace {

namespace fs = std::filesystem;

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using Json = nlohmann::json;

constexpr char kIndexKey[] = "brigade.shards";
constexpr char kIdKey[] = "brigade.checkpoint";
constexpr char kAnotherModel[] =
    ".\nLoad a checkpoint that was saved of the same model.";

// ---- Stored tensors.

// Consecutive elements of a tensor in one file.
struct Chunk {
  int64_t file = 0;  // of kFolder: the rank that writes it
  int64_t begin = 0;
  int64_t numel = 0;  // > 0
};

void to_json(Json& json, const Chunk& chunk) {
  json = {chunk.file, chunk.begin, chunk.numel};
}
void from_json(const Json& json, Chunk& chunk) {
  chunk = {json.at(0), json.at(1), json.at(2)};
}

struct StoredTensor {
  std::string name;
  std::string dtype;  // as safetensors files name it
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;
  std::vector<Chunk> chunks;  // all elements, ascending
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(StoredTensor, name, dtype, shape, strides,
                                   chunks)

// What the index holds.
struct StoredTensors {
  std::string id;  // of the checkpoint
  int64_t world_size = 1;
  std::vector<StoredTensor> tensors;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(StoredTensors, id, world_size, tensors)

int64_t numel_of(const std::vector<int64_t>& shape) {
  int64_t numel = 1;
  for (const int64_t length : shape) {
    TORCH_CHECK_VALUE(
        length >= 0 && !__builtin_mul_overflow(numel, length, &numel),
        "a shape is damaged");
  }
  return numel;
}

// Throws unless the chunks cover the tensor.
void check_chunks(const StoredTensor& tensor, int64_t num_files) {
  int64_t covered = 0;
  for (const Chunk& chunk : tensor.chunks) {
    TORCH_CHECK_VALUE(chunk.file >= 0 && chunk.file < num_files &&
                          chunk.begin == covered && chunk.numel > 0,
                      "the chunks of tensor ", quoted_name(tensor.name),
                      " do not follow each other");
    covered += chunk.numel;
  }
  const int64_t numel = numel_of(tensor.shape);
  TORCH_CHECK_VALUE(
      covered == numel && tensor.strides.size() == tensor.shape.size(),
      "the chunks of tensor ", quoted_name(tensor.name), " have ", covered,
      " elements, expected ", numel);
}

StoredTensors parse_index(const std::string& path,
                          const SafetensorsMetadata& metadata) {
  StoredTensors stored;
  std::set<std::string_view> names;
  try {
    Json::parse(metadata.at(kIndexKey)).get_to(stored);
    for (const StoredTensor& tensor : stored.tensors) {
      check_chunks(tensor, stored.world_size);
      safetensors_dtype(tensor.dtype);  // throws if there is none
      TORCH_CHECK_VALUE(names.insert(tensor.name).second, "tensor ",
                        quoted_name(tensor.name), " occurs twice");
    }
  } catch (const std::exception&) {
    TORCH_CHECK_VALUE(false, path, ": is no index of shards: ",
                      message_of(std::current_exception()),
                      "\nUse a folder that save_checkpoint() has written.");
  }
  return stored;
}

std::string shard_path(const std::string& folder, const StoredTensors& stored,
                       int64_t file) {
  return fs::path(folder) / absl::StrCat("shard-", file, "-of-",
                                         stored.world_size, ".", stored.id,
                                         ".safetensors");
}

// ---- Tensors of this rank.

bool holds_all(const CheckpointTensor& tensor) {
  return tensor.held.sizes() == tensor.shape;
}

std::vector<int64_t> c_strides(const std::vector<int64_t>& shape) {
  const at::DimVector strides = c10::contiguous_strides(shape);
  return {strides.begin(), strides.end()};
}

// The stride of a dimension of one element has no meaning.
bool is_same_order(const std::vector<int64_t>& shape,
                   const std::vector<int64_t>& left,
                   const std::vector<int64_t>& right) {
  for (size_t d = 0; d < shape.size(); ++d) {
    if (shape[d] != 1 && left[d] != right[d]) return false;
  }
  return true;
}

// The unsharded tensor's elements in the order of `strides`, [numel].
at::Tensor in_order(const at::Tensor& unsharded,
                    const std::vector<int64_t>& strides) {
  at::Tensor ordered = unsharded;
  if (unsharded.strides() != strides) {
    ordered =
        at::empty_strided(unsharded.sizes(), strides, unsharded.options());
    ordered.copy_(unsharded);
  }
  return ordered.as_strided({unsharded.numel()}, {1});
}

// The elements held, in their order.
at::Tensor flat(const CheckpointTensor& tensor) {
  const at::Tensor held = tensor.held.detach();
  return holds_all(tensor) ? in_order(held, tensor.strides)
                           : held.contiguous().view({-1});
}

std::span<const std::byte> bytes_of(const at::Tensor& contiguous) {
  return {static_cast<const std::byte*>(contiguous.const_data_ptr()),
          contiguous.nbytes()};
}

std::span<std::byte> writable_bytes_of(const at::Tensor& contiguous) {
  return {static_cast<std::byte*>(contiguous.mutable_data_ptr()),
          contiguous.nbytes()};
}

// This rank's line of the table that all ranks exchange before they save.
// "form" is equal on all ranks.
Json line_of(const CheckpointTensor& tensor, int rank) {
  TORCH_CHECK_VALUE(
      tensor.begin >= 0 &&
          tensor.held.numel() <= numel_of(tensor.shape) - tensor.begin,
      "'", tensor.name, "': holds ", tensor.held.numel(), " elements from ",
      tensor.begin, " on of a tensor of [", absl::StrJoin(tensor.shape, ", "),
      "]");
  const bool is_compared =
      tensor.shape.empty() && holds_all(tensor) && !tensor.is_optional;
  Json form =
      StoredTensor{.name = tensor.name,
                   .dtype = safetensors_dtype_name(tensor.held.scalar_type()),
                   .shape = tensor.shape,
                   .strides = tensor.strides,
                   .chunks = {}};
  form["value checksum"] =
      is_compared ? extend_checksum(0, bytes_of(tensor.held.cpu())) : 0;
  return {{"form", std::move(form)},
          {"ranks", tensor.ranks},
          {"chunk", Chunk{rank, tensor.begin, tensor.held.numel()}}};
}

// All tensors of all ranks, by the ranks' tables: those of longer elements
// first, so that files keep them aligned. Throws if the tables contradict each
// other.
std::vector<StoredTensor> merge(const std::vector<Json>& tables) {
  struct Merged {
    StoredTensor tensor;
    Json first_line;
    std::vector<int> ranks;
  };
  std::map<std::string, Merged> by_name;
  for (size_t rank = 0; rank < tables.size(); ++rank) {
    for (const Json& line : tables[rank]) {
      const Json& form = line.at("form");
      const std::string name = form.at("name");
      const auto [place, is_new] = by_name.try_emplace(name);
      auto& [tensor, first, ranks] = place->second;
      if (is_new) {
        form.get_to(tensor);
        first = line;
      }
      TORCH_CHECK_VALUE(line.at("ranks") == first.at("ranks"),
                        "expected each tensor on one mesh, found '", name,
                        "' on two, which hold different values.\nGive "
                        "parameters that lie on different ranks different "
                        "names.");
      TORCH_CHECK_VALUE(form == first.at("form"),
                        "expected the same tensor on all ranks, found '", name,
                        "': rank ", ranks.front(), " has ",
                        first.at("form").dump(), ", rank ", rank, " has ",
                        form.dump());
      ranks.push_back(static_cast<int>(rank));
      const Chunk chunk = line.at("chunk");
      const bool is_copy =
          std::ranges::any_of(tensor.chunks, [&](const Chunk& known) {
            return known.begin == chunk.begin && known.numel == chunk.numel;
          });
      if (chunk.numel > 0 && !is_copy) tensor.chunks.push_back(chunk);
    }
  }
  std::vector<StoredTensor> tensors;
  for (auto& [name, merged] : by_name) {
    auto& [tensor, first, ranks] = merged;
    const size_t num_expected = first.at("ranks").size();
    TORCH_CHECK_VALUE(
        ranks.size() == (num_expected == 0 ? tables.size() : num_expected),
        "expected the same tensors on all ranks, found '", name, "' on ",
        describe_ranks(ranks), " only");
    std::ranges::sort(tensor.chunks, {}, &Chunk::begin);
    check_chunks(tensor, static_cast<int64_t>(tables.size()));
    tensors.push_back(std::move(tensor));
  }
  std::ranges::stable_sort(
      tensors, std::greater<>(), [](const StoredTensor& tensor) {
        return c10::elementSize(safetensors_dtype(tensor.dtype));
      });
  return tensors;
}

// ---- Communication.

std::vector<at::Tensor> all_gather(const Group& group, const at::Tensor& own) {
  std::vector<at::Tensor> inputs = {own};
  std::vector<std::vector<at::Tensor>> outputs(1);
  for (int rank = 0; rank < group->getSize(); ++rank) {
    outputs.front().push_back(at::empty_like(own));
  }
  try {
    group->allgather(outputs, inputs)->wait();
  } catch (...) {
    throw_peer_error(
        absl::StrCat("rank ", group->getRank(), " of ", group->getSize(),
                     " could not save or load a checkpoint "
                     "with its peers"),
        std::current_exception());
  }
  return outputs.front();
}

std::vector<std::string> gather_texts(const Group& group,
                                      const std::string& own) {
  if (group->getSize() == 1) return {own};
  const at::Device device = control_device(*group);
  std::vector<int64_t> lengths;
  for (const at::Tensor& length : all_gather(
           group, at::full({1}, static_cast<int64_t>(own.size()), at::kLong)
                      .to(device))) {
    lengths.push_back(length.item<int64_t>());
  }
  const at::Tensor bytes = at::zeros({std::ranges::max(lengths)}, at::kByte);
  std::ranges::copy(std::as_bytes(std::span(own)),
                    writable_bytes_of(bytes).begin());
  std::vector<std::string> texts;
  for (const at::Tensor& gathered : all_gather(group, bytes.to(device))) {
    const at::Tensor text = gathered.cpu();
    texts.emplace_back(static_cast<const char*>(text.const_data_ptr()),
                       lengths[texts.size()]);
  }
  return texts;
}

// on_all_ranks() of a step without a result.
void do_on_all_ranks(const Group& group, const std::function<void()>& step) {
  on_all_ranks(group, [&] {
    step();
    return std::string();
  });
}

void require_equal(const std::vector<std::string>& by_rank,
                   std::string_view what) {
  TORCH_CHECK_VALUE(std::ranges::count(by_rank, by_rank[0]) ==
                        static_cast<std::ptrdiff_t>(by_rank.size()),
                    "expected the same ", what,
                    " on all ranks: ", describe_by_value(by_rank));
}

// ---- Saving.

const CheckpointTensor* find(const std::vector<CheckpointTensor>& tensors,
                             const std::string& name) {
  const auto found = std::ranges::find(tensors, name, &CheckpointTensor::name);
  return found == tensors.end() ? nullptr : &*found;
}

void save_file(const Group& group, const std::vector<CheckpointTensor>& tensors,
               const StoredTensors& stored, const std::string& path,
               const SafetensorsMetadata& metadata) {
  std::optional<SafetensorsWriter> writer;
  do_on_all_ranks(group, [&] {
    if (group->getRank() != 0) return;
    std::vector<SafetensorsEntry> entries;
    for (const StoredTensor& tensor : stored.tensors) {
      entries.push_back(
          {tensor.name, safetensors_dtype(tensor.dtype), tensor.shape});
    }
    writer.emplace(path, std::move(entries), metadata);
  });
  std::exception_ptr failure;  // of writing; the peers' all-gathers go on
  const auto write = [&](const at::Tensor& piece) {
    if (!writer || failure) return;
    try {
      writer->write(bytes_of(piece.contiguous().cpu()));
    } catch (...) {
      failure = std::current_exception();
    }
  };
  for (const StoredTensor& tensor : stored.tensors) {
    const CheckpointTensor* const own = find(tensors, tensor.name);
    std::vector<at::Tensor> pieces;  // by chunk
    if (std::ranges::all_of(tensor.chunks, [](const Chunk& chunk) {
          return chunk.file == 0;
        })) {
      if (own != nullptr) pieces.push_back(flat(*own));
    } else {
      const int64_t most =
          std::ranges::max(tensor.chunks, {}, &Chunk::numel).numel;
      // A rank without the tensor doesn't know its device.
      const at::Tensor sent =
          at::zeros({most}, at::TensorOptions(safetensors_dtype(tensor.dtype))
                                .device(control_device(*group)));
      if (own != nullptr) {
        sent.narrow(0, 0, own->held.numel()).copy_(flat(*own));
      }
      const std::vector<at::Tensor> received = all_gather(group, sent);
      for (const Chunk& chunk : tensor.chunks) {
        pieces.push_back(received[chunk.file].narrow(0, 0, chunk.numel));
      }
    }
    if (!writer || tensor.chunks.empty()) continue;
    if (is_same_order(tensor.shape, tensor.strides, c_strides(tensor.shape))) {
      for (const at::Tensor& piece : pieces) write(piece);
    } else {
      write(at::cat(pieces).as_strided(tensor.shape, tensor.strides));
    }
  }
  do_on_all_ranks(group, [&] {
    if (failure) std::rethrow_exception(failure);
    if (writer) writer->finish();
  });
}

// Throws unless the file is there and of this checkpoint.
std::unique_ptr<SafetensorsReader> open_shard(const std::string& folder,
                                              const StoredTensors& stored,
                                              int64_t file) {
  const std::string path = shard_path(folder, stored, file);
  auto reader = std::make_unique<SafetensorsReader>(path);
  const auto id = reader->metadata().find(kIdKey);
  TORCH_CHECK_VALUE(id != reader->metadata().end() && id->second == stored.id,
                    path, ": expected a file of checkpoint ", stored.id,
                    ", found another.\nUse another copy of it.");
  return reader;
}

// Files of other checkpoints, complete or not. A file that can't be removed
// stays.
void remove_other_shards(const std::string& folder, const std::string& id) {
  std::error_code error;
  std::vector<fs::path> others;
  for (fs::directory_iterator entry(folder, error);
       !error && entry != fs::directory_iterator(); entry.increment(error)) {
    const std::string name = entry->path().filename();
    if (absl::StartsWith(name, "shard-") &&
        absl::StrContains(name, ".safetensors") &&
        !absl::StrContains(name, absl::StrCat(".", id, "."))) {
      others.push_back(entry->path());
    }
  }
  for (const fs::path& other : others) fs::remove(other, error);
}

void save_folder(const Group& group,
                 const std::vector<CheckpointTensor>& tensors,
                 const StoredTensors& stored, const std::string& folder,
                 SafetensorsMetadata metadata) {
  const int64_t rank = group->getRank();
  const std::string own_path = shard_path(folder, stored, rank);
  std::vector<SafetensorsEntry> entries;
  std::vector<const CheckpointTensor*> written;
  for (const StoredTensor& tensor : stored.tensors) {
    for (const Chunk& chunk : tensor.chunks) {
      if (chunk.file != rank) continue;
      written.push_back(find(tensors, tensor.name));
      entries.push_back(
          {tensor.name, written.back()->held.scalar_type(), {chunk.numel}});
    }
  }
  try {
    do_on_all_ranks(group, [&] {
      std::error_code error;
      fs::create_directories(folder, error);
      TORCH_CHECK_VALUE(!error, "'", folder,
                        "' cannot be made: ", error.message(),
                        "\nCheck that the folder around it can be written.");
      if (written.empty()) return;
      SafetensorsWriter writer(own_path, std::move(entries),
                               {{kIdKey, stored.id}});
      for (const CheckpointTensor* tensor : written) {
        writer.write(bytes_of(flat(*tensor).cpu()));
      }
      writer.finish();
    });
    do_on_all_ranks(group, [&] {  // before the index is replaced
      if (rank != 0) return;
      std::set<int64_t> files;
      for (const StoredTensor& tensor : stored.tensors) {
        for (const Chunk& chunk : tensor.chunks) files.insert(chunk.file);
      }
      for (const int64_t file : files) {
        TORCH_CHECK_VALUE(fs::exists(shard_path(folder, stored, file)),
                          "rank 0 does not see the file that rank ", file,
                          " has written to '", folder,
                          "'.\nSave into a folder that all ranks share.");
        open_shard(folder, stored, file);
      }
    });
  } catch (...) {
    std::error_code ignored;
    if (!written.empty()) fs::remove(own_path, ignored);
    throw;
  }
  do_on_all_ranks(group, [&] {
    if (rank != 0) return;
    metadata[kIndexKey] = Json(stored).dump();
    SafetensorsWriter(fs::path(folder) / "index.safetensors", {}, metadata)
        .finish();
    remove_other_shards(folder, stored.id);
  });
}

// ---- Loading.

// A checkpoint of either layout, opened.
class StoredFiles {
 public:
  explicit StoredFiles(const std::string& path) : path_(path) {
    const bool is_folder = fs::is_directory(path);
    auto first = std::make_unique<SafetensorsReader>(
        is_folder ? (fs::path(path) / "index.safetensors").string() : path);
    metadata_ = first->metadata();
    fingerprint_ =
        absl::StrCat("a checkpoint of checksum ", first->header_checksum());
    if (is_folder) {
      stored_ = parse_index(first->path(), metadata_);
      metadata_.erase(kIndexKey);
    } else {
      for (const SafetensorsEntry& entry : first->entries()) {
        const int64_t numel = numel_of(entry.shape);
        StoredTensor tensor = {.name = entry.name,
                               .dtype = safetensors_dtype_name(entry.dtype),
                               .shape = entry.shape,
                               .strides = c_strides(entry.shape),
                               .chunks = {}};
        if (numel > 0) tensor.chunks.push_back({0, 0, numel});
        stored_.tensors.push_back(std::move(tensor));
      }
      readers_[0] = std::move(first);
    }
    for (const StoredTensor& tensor : stored_.tensors) {
      places_.emplace(tensor.name, &tensor);
    }
  }

  const std::string& fingerprint() const { return fingerprint_; }
  const SafetensorsMetadata& metadata() const { return metadata_; }

  CheckpointContents contents() const {
    CheckpointContents contents = {
        .path = path_, .names = {}, .metadata = metadata_};
    for (const auto& [name, tensor] : places_) contents.names.emplace(name);
    return contents;
  }

  // Throws unless the checkpoint has the tensor in this form.
  void check(const CheckpointTensor& tensor) const {
    const auto place = places_.find(tensor.name);
    TORCH_CHECK_VALUE(place != places_.end(), "'", path_, "' has no tensor '",
                      tensor.name, "'", kAnotherModel);
    const StoredTensor& found = *place->second;
    const std::string dtype = safetensors_dtype_name(tensor.held.scalar_type());
    TORCH_CHECK_VALUE(found.shape == tensor.shape && found.dtype == dtype, "'",
                      path_, "': tensor '", tensor.name, "' is ", found.dtype,
                      " of [", absl::StrJoin(found.shape, ", "), "], where ",
                      dtype, " of [", absl::StrJoin(tensor.shape, ", "),
                      "] is expected", kAnotherModel);
  }

  // Compares the checksums of all data that read() of these tensors reads.
  void verify(const std::vector<CheckpointTensor>& tensors) {
    for (const CheckpointTensor& tensor : tensors) {
      for_each_piece(tensor, [&](const Chunk& chunk, int64_t, int64_t) {
        const SafetensorsReader& reader = open(chunk.file);
        const SafetensorsEntry* const found = reader.find(tensor.name);
        const int64_t expected =
            chunk.numel * static_cast<int64_t>(tensor.held.element_size());
        TORCH_CHECK_VALUE(found != nullptr && found->num_bytes() == expected &&
                              found->dtype == tensor.held.scalar_type(),
                          reader.path(), ": expected ", chunk.numel,
                          " elements of tensor ", quoted_name(tensor.name),
                          ", as the index says.\nUse another copy of it.");
        reader.verify(tensor.name);
      });
    }
  }

  // Fills `tensor.held`. REQUIRES: check() and verify() have passed.
  void read(const CheckpointTensor& tensor) {
    const StoredTensor& stored = *places_.at(tensor.name);
    const at::TensorOptions options = tensor.held.options().device(at::kCPU);
    const auto [begin, numel] = elements_read(tensor);
    at::Tensor run = at::empty({numel}, options);
    const auto element = static_cast<int64_t>(run.element_size());
    for_each_piece(tensor, [&](const Chunk& chunk, int64_t first, int64_t end) {
      open(chunk.file)
          .read(tensor.name, (first - chunk.begin) * element,
                writable_bytes_of(run.narrow(0, first - begin, end - first)));
    });
    if (!has_order_of(tensor)) {
      run =
          in_order(run.as_strided(stored.shape, stored.strides), tensor.strides)
              .narrow(0, tensor.begin, tensor.held.numel());
    }
    const at::Tensor held = tensor.held.detach();
    held.copy_(holds_all(tensor) ? run.as_strided(tensor.shape, tensor.strides,
                                                  run.storage_offset())
                                 : run.view(held.sizes()));
  }

 private:
  bool has_order_of(const CheckpointTensor& tensor) const {
    return is_same_order(tensor.shape, tensor.strides,
                         places_.at(tensor.name)->strides);
  }

  // The consecutive stored elements that contain those held: {begin, numel}.
  // All of them if they are stored in another order.
  std::pair<int64_t, int64_t> elements_read(
      const CheckpointTensor& tensor) const {
    if (has_order_of(tensor)) return {tensor.begin, tensor.held.numel()};
    return {0, numel_of(tensor.shape)};
  }

  // `use(chunk, first, end)` of the elements that this rank reads.
  template <typename Use>
  void for_each_piece(const CheckpointTensor& tensor, const Use& use) const {
    const auto [begin, numel] = elements_read(tensor);
    for (const Chunk& chunk : places_.at(tensor.name)->chunks) {
      const int64_t first = std::max(begin, chunk.begin);
      const int64_t end = std::min(begin + numel, chunk.begin + chunk.numel);
      if (first < end) use(chunk, first, end);
    }
  }

  const SafetensorsReader& open(int64_t file) {
    std::unique_ptr<SafetensorsReader>& reader = readers_[file];
    if (reader == nullptr) reader = open_shard(path_, stored_, file);
    return *reader;
  }

  const std::string path_;
  std::string fingerprint_;  // another one for other contents
  SafetensorsMetadata metadata_;
  StoredTensors stored_;
  std::map<std::string_view, const StoredTensor*> places_;         // by name
  std::map<int64_t, std::unique_ptr<SafetensorsReader>> readers_;  // by file
};

}  // namespace

std::vector<std::string> on_all_ranks(
    const Group& group, const std::function<std::string()>& step) {
  std::string own;
  try {
    own = absl::StrCat("+", step());
  } catch (...) {
    own = absl::StrCat("-", message_of(std::current_exception()));
  }
  std::vector<std::string> texts = gather_texts(group, own);
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    if (texts[rank][0] == '+') continue;
    const bool is_same_on_all = std::ranges::count(texts, texts[rank]) ==
                                static_cast<std::ptrdiff_t>(texts.size());
    TORCH_CHECK_VALUE(false,
                      is_same_on_all ? "" : c10::str("rank ", rank, ": "),
                      texts[rank].substr(1));
  }
  for (std::string& text : texts) text.erase(0, 1);
  return texts;
}

void save_tensors(const Group& group,
                  const std::vector<CheckpointTensor>& tensors,
                  const std::string& path, CheckpointLayout layout,
                  SafetensorsMetadata metadata) {
  const at::NoGradGuard no_grad;
  std::vector<Json> tables;
  std::vector<std::string> metadatas;
  std::string id;
  for (const std::string& text : on_all_ranks(group, [&] {
         TORCH_CHECK_VALUE(!metadata.contains(kIndexKey), "the metadata key '",
                           kIndexKey, "' is reserved");
         std::random_device random;
         Json own = {{"id", absl::StrCat(absl::Hex(random(), absl::kZeroPad8),
                                         absl::Hex(random(), absl::kZeroPad8))},
                     {"metadata", metadata},
                     {"table", Json::array()}};
         for (const CheckpointTensor& tensor : tensors) {
           own["table"].push_back(line_of(tensor, group->getRank()));
         }
         return own.dump();
       })) {
    Json of_rank = Json::parse(text);
    if (id.empty()) id = of_rank.at("id");
    metadatas.push_back(of_rank.at("metadata").dump());
    tables.push_back(std::move(of_rank.at("table")));
  }
  require_equal(metadatas, "metadata");
  const StoredTensors stored = {
      .id = id, .world_size = group->getSize(), .tensors = merge(tables)};
  if (layout == CheckpointLayout::kFolder) {
    save_folder(group, tensors, stored, path, std::move(metadata));
  } else {
    save_file(group, tensors, stored, path, metadata);
  }
}

SafetensorsMetadata load_tensors(
    const Group& group, const std::string& path,
    const std::function<
        std::vector<CheckpointTensor>(const CheckpointContents&)>& choose) {
  const at::NoGradGuard no_grad;
  std::optional<StoredFiles> files;
  std::vector<CheckpointTensor> tensors;
  require_equal(on_all_ranks(group,
                             [&] {
                               files.emplace(path);
                               tensors = choose(files->contents());
                               for (const CheckpointTensor& tensor : tensors) {
                                 files->check(tensor);
                               }
                               return files->fingerprint();
                             }),
                "checkpoint");
  do_on_all_ranks(group, [&] { files->verify(tensors); });
  do_on_all_ranks(group, [&] {
    try {
      for (const CheckpointTensor& tensor : tensors) files->read(tensor);
    } catch (const c10::ValueError& error) {
      TORCH_CHECK_VALUE(false, error.what_without_backtrace(),
                        "\nSome tensors have been loaded, others have not: "
                        "load a checkpoint before anything else.");
    }
  });
  return files->metadata();
}

}  // namespace brigade
