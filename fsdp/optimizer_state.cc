#include "brigade/fsdp/optimizer_state.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/scalar_tensor.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "brigade/comm/agreement.h"
#include "brigade/fsdp/optimizer_type.h"
#include "brigade/fsdp/safetensors_file.h"
#include "brigade/fsdp/shard_files.h"
#include "brigade/fsdp/sharded_state.h"
#include "brigade/fsdp/sharded_tensors.h"

namespace brigade {
namespace {

namespace optim = torch::optim;

constexpr char kOptimizerKey[] = "brigade.optimizer";
constexpr char kLoadAlone[] =
    ".\nMake the optimizer as the saved one was made, or load the parameters "
    "alone.";

// A shard that the optimizer steps.
struct Stepped {
  at::Tensor shard;
  std::string name;  // of its parameter
  const optim::OptimizerOptions* options;
};

// A field of one shard, as a file has it.
struct SavedField {
  at::Tensor tensor;
  bool is_count = false;
};

// By the shard's TensorImpl, by the field's name.
using SavedFields = std::map<const void*, std::map<std::string, SavedField>>;

struct Found {
  const OptimizerType* type = nullptr;
  std::vector<Stepped> stepped;
};

// What a checkpoint holds.
struct Contents {
  std::string path;
  std::set<std::string, std::less<>> names;
  SafetensorsMetadata metadata;
};

std::map<const void*, std::string> names_of_shards(const ShardedRoot& root) {
  std::map<const void*, std::string> names;
  for (size_t unit = 0; unit < root.num_units(); ++unit) {
    for (const auto& segment : root.unit(unit).segments) {
      for (size_t i = 0; i < segment->parameters().size(); ++i) {
        names.emplace(segment->shards()[i].unsafeGetTensorImpl(),
                      segment->parameters()[i].name);
      }
    }
  }
  return names;
}

absl::StatusOr<Found> find_stepped(const ShardedRoot& root,
                                   const optim::Optimizer& optimizer) {
  Found found = {.type = type_of(optimizer), .stepped = {}};
  if (found.type == nullptr) {
    return absl::InvalidArgumentError(
        "expected an optimizer that keeps its state by parameter: SGD, Adam, "
        "AdamW, RMSprop or Adagrad, found another.\nSave and load what it "
        "keeps as ShardedTensors.");
  }
  const std::map<const void*, std::string> names = names_of_shards(root);
  size_t index = 0;
  for (const optim::OptimizerParamGroup& group : optimizer.param_groups()) {
    for (const at::Tensor& shard : group.params()) {
      const auto name = names.find(shard.unsafeGetTensorImpl());
      if (name == names.end()) {
        return absl::InvalidArgumentError(absl::StrCat(
            "parameter ", index,
            " of the optimizer is no shard of this model."
            "\nMake the optimizer of ShardedRoot::shards(), or of some."));
      }
      found.stepped.push_back(
          {.shard = shard, .name = name->second, .options = &group.options()});
      ++index;
    }
  }
  return found;
}

// All ranks throw alike if one can't go on, or if optimizers differ in type.
void agree(const ShardedRoot& root, const OptimizerType* type,
           const absl::Status& status) {
  const std::vector<std::string> items = {type == nullptr ? "" : type->name};
  require_agreement(root.group(), at::kCPU, "saved optimizer", items, status);
}

SavedFields fields_to_save(const Found& found,
                           const optim::Optimizer& optimizer) {
  SavedFields saved;
  for (const Stepped& stepped : found.stepped) {
    void* const key = stepped.shard.unsafeGetTensorImpl();
    const auto state = optimizer.state().find(key);
    if (state == optimizer.state().end()) continue;
    for (const StateField& field :
         found.type->fields(*state->second, *stepped.options)) {
      if (const auto* tensor = std::get_if<at::Tensor*>(&field.value)) {
        saved[key][field.name] = {.tensor = **tensor};
      } else {
        saved[key][field.name] = {
            .tensor =
                at::scalar_tensor(*std::get<int64_t*>(field.value), at::kLong),
            .is_count = true};
      }
    }
  }
  return saved;
}

std::vector<ShardedTensors> parameters_and(const SavedFields& saved) {
  std::map<std::string, bool> is_count;
  for (const auto& [shard, fields] : saved) {
    for (const auto& [name, field] : fields) is_count[name] = field.is_count;
  }
  std::vector<ShardedTensors> tensors = {parameters_of_shards()};
  for (const auto& [name, counts] : is_count) {
    tensors.push_back({.suffix = "." + name,
                       .of =
                           [&saved, name = name](const at::Tensor& shard) {
                             const auto fields =
                                 saved.find(shard.unsafeGetTensorImpl());
                             if (fields == saved.end()) return at::Tensor();
                             const auto field = fields->second.find(name);
                             return field == fields->second.end()
                                        ? at::Tensor()
                                        : field->second.tensor;
                           },
                       .is_replicated = counts});
  }
  return tensors;
}

// States as they will be, and what is read into them.
class StagedStates {
 public:
  // Errors: InvalidArgument if the checkpoint has not what the optimizer keeps.
  static absl::StatusOr<StagedStates> create(const ShardedRoot& root,
                                             const Found& found,
                                             const Contents& contents) {
    if (absl::Status status = check_type(*found.type, contents); !status.ok()) {
      return status;
    }
    StagedStates staged;
    std::set<std::string> wanted;
    for (const Stepped& stepped : found.stepped) {
      absl::Status status =
          staged.stage(*found.type, stepped, contents, &wanted);
      if (!status.ok()) return status;
    }
    absl::Status status = check_all_wanted(root, found, contents, wanted);
    if (!status.ok()) return status;
    return staged;
  }

  const SavedFields& fields() const { return fields_; }

  void commit(optim::Optimizer& optimizer) && {
    for (const auto& [count, tensor] : counts_) {
      *count = tensor.item<int64_t>();
    }
    for (auto& [shard, state] : states_) {
      if (state) {
        optimizer.state()[shard] = std::move(state);
      } else {
        optimizer.state().erase(shard);
      }
    }
  }

 private:
  static absl::Status check_type(const OptimizerType& type,
                                 const Contents& contents) {
    const auto saved = contents.metadata.find(kOptimizerKey);
    if (saved == contents.metadata.end()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "'", contents.path, "': expected the state of ", type.name,
          ", found no optimizer's.\nLoad the parameters alone."));
    }
    if (saved->second != type.name) {
      return absl::InvalidArgumentError(absl::StrCat(
          "'", contents.path, "': expected the state of ", type.name,
          ", found that of ", quoted_name(saved->second), kLoadAlone));
    }
    return absl::OkStatus();
  }

  absl::Status stage(const OptimizerType& type, const Stepped& stepped,
                     const Contents& contents, std::set<std::string>* wanted) {
    void* const key = stepped.shard.unsafeGetTensorImpl();
    std::unique_ptr<optim::OptimizerParamState> state = type.make_state();
    const std::vector<StateField> fields =
        type.fields(*state, *stepped.options);
    std::string missing;
    std::string present;
    for (const StateField& field : fields) {
      const std::string name = absl::StrCat(stepped.name, ".", field.name);
      (contents.names.contains(name) ? present : missing) = name;
    }
    if (present.empty() && !type.has_state_before_steps) {
      states_.emplace_back(key, nullptr);
      return absl::OkStatus();
    }
    if (!missing.empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat("'", contents.path, "' has no tensor '", missing,
                       "', which this ", type.name, " keeps", kLoadAlone));
    }
    for (const StateField& field : fields) {
      wanted->insert(absl::StrCat(stepped.name, ".", field.name));
      SavedField& saved = fields_[key][field.name];
      if (const auto* tensor = std::get_if<at::Tensor*>(&field.value)) {
        saved = {.tensor = at::empty_like(stepped.shard)};
        **tensor = saved.tensor;
      } else {
        saved = {.tensor = at::empty({}, at::kLong), .is_count = true};
        counts_.emplace_back(std::get<int64_t*>(field.value), saved.tensor);
      }
    }
    states_.emplace_back(key, std::move(state));
    return absl::OkStatus();
  }

  // What was saved and is not wanted would be lost.
  static absl::Status check_all_wanted(const ShardedRoot& root,
                                       const Found& found,
                                       const Contents& contents,
                                       const std::set<std::string>& wanted) {
    for (const auto& [shard, parameter] : names_of_shards(root)) {
      for (const std::string& field : all_state_fields()) {
        const std::string name = absl::StrCat(parameter, ".", field);
        if (!contents.names.contains(name) || wanted.contains(name)) continue;
        return absl::InvalidArgumentError(absl::StrCat(
            "'", contents.path, "' has tensor '", name, "', which this ",
            found.type->name, " does not keep", kLoadAlone));
      }
    }
    return absl::OkStatus();
  }

  SavedFields fields_;
  std::vector<std::pair<int64_t*, at::Tensor>> counts_;  // in states_
  // By the shard's TensorImpl; null: it has none.
  std::vector<std::pair<void*, std::unique_ptr<optim::OptimizerParamState>>>
      states_;
};

// `save(tensors, metadata)`.
template <typename Save>
void save(ShardedRoot& root, const optim::Optimizer& optimizer,
          SafetensorsMetadata metadata, const Save& save) {
  const absl::StatusOr<Found> found = find_stepped(root, optimizer);
  agree(root, found.ok() ? found->type : nullptr, found.status());
  metadata[kOptimizerKey] = found->type->name;
  const SavedFields saved = fields_to_save(*found, optimizer);
  save(parameters_and(saved), metadata);
}

// `load(tensors)`.
template <typename Load>
SafetensorsMetadata load(ShardedRoot& root, optim::Optimizer& optimizer,
                         const absl::StatusOr<Contents>& contents,
                         const Load& load) {
  const absl::StatusOr<Found> found = find_stepped(root, optimizer);
  absl::StatusOr<StagedStates> staged =
      !found.ok()      ? absl::StatusOr<StagedStates>(found.status())
      : !contents.ok() ? absl::StatusOr<StagedStates>(contents.status())
                       : StagedStates::create(root, *found, *contents);
  agree(root, found.ok() ? found->type : nullptr, staged.status());
  SafetensorsMetadata metadata = load(parameters_and(staged->fields()));
  (*std::move(staged)).commit(optimizer);
  return metadata;
}

absl::StatusOr<Contents> contents_of_file(const std::string& path) {
  const absl::StatusOr<SafetensorsReader> reader =
      SafetensorsReader::open(path);
  if (!reader.ok()) return reader.status();
  Contents contents = {
      .path = path, .names = {}, .metadata = reader->metadata()};
  for (const SafetensorsEntry& entry : reader->entries()) {
    contents.names.insert(entry.name);
  }
  return contents;
}

absl::StatusOr<Contents> contents_of_folder(const std::string& folder) {
  absl::StatusOr<ShardsContents> shards = read_shards_index(folder);
  if (!shards.ok()) return shards.status();
  Contents contents = {
      .path = folder, .names = {}, .metadata = std::move(shards->metadata)};
  for (const IndexedTensor& tensor : shards->index.tensors) {
    contents.names.insert(tensor.name);
  }
  return contents;
}

}  // namespace

void save_whole(ShardedRoot& root, const optim::Optimizer& optimizer,
                const std::string& path, const SafetensorsMetadata& metadata) {
  save(root, optimizer, metadata,
       [&](const std::vector<ShardedTensors>& tensors,
           const SafetensorsMetadata& all) {
         save_whole(root, path, tensors, all);
       });
}

SafetensorsMetadata load_whole(ShardedRoot& root, optim::Optimizer& optimizer,
                               const std::string& path) {
  return load(root, optimizer, contents_of_file(path),
              [&](const std::vector<ShardedTensors>& tensors) {
                return load_whole(root, path, tensors);
              });
}

void save_shards(ShardedRoot& root, const optim::Optimizer& optimizer,
                 const std::string& folder,
                 const SafetensorsMetadata& metadata) {
  save(root, optimizer, metadata,
       [&](const std::vector<ShardedTensors>& tensors,
           const SafetensorsMetadata& all) {
         save_shards(root, folder, tensors, all);
       });
}

SafetensorsMetadata load_shards(ShardedRoot& root, optim::Optimizer& optimizer,
                                const std::string& folder) {
  return load(root, optimizer, contents_of_folder(folder),
              [&](const std::vector<ShardedTensors>& tensors) {
                return load_shards(root, folder, tensors);
              });
}

}  // namespace brigade
