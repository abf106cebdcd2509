// collect: which parameters a fully_shard call owns, found by walking the module.
#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fsdp/runtime/unit.h"
#include "tessera/model_contract.h"
#include "tessera/shard.h"

namespace tessera::fsdp {

struct FoundParameter {
  ParameterMeta meta;  ///< of the local tensor: its shape is not yet the whole parameter's
  /// The layout that its module or ShardOptions::layouts declares; none where neither does.
  std::optional<ParameterLayout> declared;
  std::vector<std::shared_ptr<Leaf>> leaves;  ///< several where tensors share one storage (tied)
};

struct FoundBuffer {
  BufferMeta meta;
  at::Tensor tensor;
};

struct FoundHandle {
  std::string path;
  std::shared_ptr<ShardedBase> handle;
};

/// The place of a tensor or a sharded child in a module of the walk. A tensor that several modules
/// register, or a module that is in several places, has several.
struct FoundPlace {
  std::string path;
  std::shared_ptr<Leaf> leaf = {};           ///< a parameter, of any unit
  at::Tensor buffer = {};                    ///< or a buffer
  std::shared_ptr<ShardedBase> handle = {};  ///< or a sharded child
};

struct Found {
  std::vector<FoundParameter> parameters;  ///< not owned by any unit yet, in registration order
  std::vector<FoundBuffer> buffers;        ///< of modules that no unit owns yet, each once
  std::vector<std::string> ignored;        ///< paths of ShardOptions::ignored_parameters, each once
  std::vector<FoundHandle> handles;        ///< sharded children, outermost only
  std::vector<std::shared_ptr<Leaf>> owned_by_others;  ///< tensors that another unit already owns
  std::vector<FoundPlace> places;                      ///< in the order of the modules
};

/// Errors: kUsage for a parameter with a gradient or a hook on it, kContract for tied tensors of
/// different dtypes or shapes, or whose modules declare different layouts; for a path in
/// options.layouts or options.tied that no parameter has, or in options.unstored_buffers that no
/// buffer has.
Found collect(torch::nn::Module& module, const ShardOptions& options);

}  // namespace tessera::fsdp
