#include "brigade/fsdp/checkpoint/optimizer_checkpoint.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <cstddef>
#include <set>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "brigade/fsdp/checkpoint/optimizer_type.h"
#include "brigade/fsdp/checkpoint/safetensors_file.h"
#include "brigade/fsdp/checkpoint/shard_files.h"
#include "brigade/fsdp/checkpoint/sharded_state.h"
#include "brigade/fsdp/checkpoint/sharded_tensors.h"

namespace brigade {
namespace {

constexpr char kOptimizerKey[] = "brigade.optimizer";
constexpr char kLoadAlone[] =
    ".\nMake the optimizer as the saved one was made, or load the parameters "
    "alone.";

// What a checkpoint holds.
struct Contents {
  std::string path;
  std::set<std::string, std::less<>> names;
  SafetensorsMetadata metadata;
};

// Of parameters, by shard.
using Names = std::map<const void*, std::string>;

Names names_in(const CheckpointedModel& model) {
  Names names;
  for (const CheckpointedParameter& parameter : model.parameters()) {
    names.emplace(parameter.held.unsafeGetTensorImpl(), parameter.name);
  }
  return names;
}

absl::Status check_shards(const absl::StatusOr<OptimizerForm>& form,
                          const Names& names) {
  if (!form.ok()) return form.status();
  for (size_t i = 0; i < form->stepped.size(); ++i) {
    if (!names.contains(form->stepped[i].shard.unsafeGetTensorImpl())) {
      return absl::InvalidArgumentError(
          absl::StrCat("parameter ", i,
                       " of the optimizer is none of this model.\nMake the "
                       "optimizer of the model's parameters, of their shards "
                       "where it is sharded, or of some."));
    }
  }
  return absl::OkStatus();
}

// All ranks throw alike if one can't go on, or if optimizers differ in type.
void agree(const CheckpointedModel& model,
           const absl::StatusOr<OptimizerForm>& form,
           const absl::Status& status) {
  model.require_agreement("saved optimizer", {form.ok() ? form->type : ""},
                          status);
}

std::vector<ShardedTensors> parameters_and(const OptimizerForm& form,
                                           const OptimizerFields& kept) {
  std::map<std::string, bool> is_count;
  for (const SteppedShard& stepped : form.stepped) {
    const auto fields = kept.find(stepped.shard.unsafeGetTensorImpl());
    if (fields == kept.end()) continue;
    for (const FieldForm& field : stepped.fields) {
      if (fields->second.contains(field.name)) {
        is_count[field.name] = field.is_count;
      }
    }
  }
  std::vector<ShardedTensors> tensors = {parameters_of_shards()};
  for (const auto& [name, counts] : is_count) {
    tensors.push_back({.suffix = "." + name,
                       .of =
                           [&kept, name = name](const at::Tensor& shard) {
                             const auto fields =
                                 kept.find(shard.unsafeGetTensorImpl());
                             if (fields == kept.end()) return at::Tensor();
                             const auto field = fields->second.find(name);
                             return field == fields->second.end()
                                        ? at::Tensor()
                                        : field->second;
                           },
                       .is_replicated = counts});
  }
  return tensors;
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

absl::Status check_type(const OptimizerForm& form, const Contents& contents) {
  const auto saved = contents.metadata.find(kOptimizerKey);
  if (saved == contents.metadata.end()) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", contents.path, "': expected the state of ", form.type,
                     ", found no optimizer's.\nLoad the parameters alone."));
  }
  if (saved->second != form.type) {
    return absl::InvalidArgumentError(absl::StrCat(
        "'", contents.path, "': expected the state of ", form.type,
        ", found that of ", quoted_name(saved->second), kLoadAlone));
  }
  return absl::OkStatus();
}

// The fields of a shard that the checkpoint has: all, or none.
absl::StatusOr<std::set<std::string>> fields_in(const OptimizerForm& form,
                                                const SteppedShard& stepped,
                                                const std::string& parameter,
                                                const Contents& contents) {
  std::set<std::string> found;
  std::string missing;
  for (const FieldForm& field : stepped.fields) {
    const std::string name = absl::StrCat(parameter, ".", field.name);
    if (contents.names.contains(name)) {
      found.insert(name);
    } else {
      missing = name;
    }
  }
  if (found.empty() && !form.has_state_before_steps) return found;
  if (!missing.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", contents.path, "' has no tensor '", missing,
                     "', which this ", form.type, " keeps", kLoadAlone));
  }
  return found;
}

// What was saved and is not wanted would be lost.
absl::Status check_all_wanted(const OptimizerForm& form, const Names& names,
                              const Contents& contents,
                              const std::set<std::string>& wanted) {
  for (const auto& [shard, parameter] : names) {
    for (const std::string& field : all_state_fields()) {
      const std::string name = absl::StrCat(parameter, ".", field);
      if (!contents.names.contains(name) || wanted.contains(name)) continue;
      return absl::InvalidArgumentError(absl::StrCat(
          "'", contents.path, "' has tensor '", name, "', which this ",
          form.type, " does not keep", kLoadAlone));
    }
  }
  return absl::OkStatus();
}

// Memory for what is to be read.
absl::StatusOr<OptimizerFields> fields_to_read(
    const OptimizerForm& form, const Names& names,
    const absl::StatusOr<Contents>& contents) {
  if (!contents.ok()) return contents.status();
  if (absl::Status status = check_type(form, *contents); !status.ok()) {
    return status;
  }
  OptimizerFields fields;
  std::set<std::string> wanted;
  for (const SteppedShard& stepped : form.stepped) {
    const void* const key = stepped.shard.unsafeGetTensorImpl();
    absl::StatusOr<std::set<std::string>> found =
        fields_in(form, stepped, names.at(key), *contents);
    if (!found.ok()) return found.status();
    if (found->empty()) continue;
    wanted.merge(*found);
    for (const FieldForm& field : stepped.fields) {
      fields[key][field.name] = field.is_count ? at::empty({}, at::kLong)
                                               : at::empty_like(stepped.shard);
    }
  }
  absl::Status status = check_all_wanted(form, names, *contents, wanted);
  if (!status.ok()) return status;
  return fields;
}

}  // namespace

void save_checkpoint(const CheckpointedModel& model, CheckpointKind kind,
                     const std::string& path,
                     const absl::StatusOr<OptimizerForm>& form,
                     const OptimizerFields& fields,
                     SafetensorsMetadata metadata) {
  agree(model, form, check_shards(form, names_in(model)));
  metadata[kOptimizerKey] = form->type;
  const std::vector<ShardedTensors> tensors = parameters_and(*form, fields);
  if (kind == CheckpointKind::kFile) {
    save_whole(model, path, tensors, metadata);
  } else {
    save_shards(model, path, tensors, metadata);
  }
}

LoadedState load_checkpoint(const CheckpointedModel& model, CheckpointKind kind,
                            const std::string& path,
                            const absl::StatusOr<OptimizerForm>& form) {
  const bool is_file = kind == CheckpointKind::kFile;
  const Names names = names_in(model);
  const absl::Status checked = check_shards(form, names);
  absl::StatusOr<OptimizerFields> fields =
      checked.ok() ? fields_to_read(*form, names,
                                    is_file ? contents_of_file(path)
                                            : contents_of_folder(path))
                   : absl::StatusOr<OptimizerFields>(checked);
  agree(model, form, fields.status());
  const std::vector<ShardedTensors> tensors = parameters_and(*form, *fields);
  SafetensorsMetadata metadata = is_file ? load_whole(model, path, tensors)
                                         : load_shards(model, path, tensors);
  return {.fields = *std::move(fields), .metadata = std::move(metadata)};
}

}  // namespace brigade
