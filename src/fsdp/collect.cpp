#include "fsdp/collect.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <map>
#include <set>

#include "fsdp/runtime/unit.h"
#include "grad/torch_dtype.h"
#include "layout/range.h"
#include "tessera/error.h"

namespace tessera::fsdp {
namespace {

/// Identifies a parameter: two tensors are one where they show the same elements of one storage.
struct Identity {
  const void* storage;
  std::int64_t offset;
  std::vector<std::int64_t> sizes;
  std::vector<std::int64_t> strides;
  auto operator<=>(const Identity&) const = default;
};

Identity identity_of(const at::Tensor& tensor) {
  // Empty tensors may share a storage without being one parameter.
  if (tensor.numel() == 0) return {tensor.unsafeGetTensorImpl(), 0, tensor.sizes().vec(), {}};
  return {tensor.storage().unsafeGetStorageImpl(), tensor.storage_offset(), tensor.sizes().vec(),
          tensor.strides().vec()};
}

/// The bytes of the storage between a tensor's first and last element.
struct Extent {
  layout::Range bytes;
  std::string name;
  at::Tensor tensor;
};

Extent extent_of(const at::Tensor& tensor, const std::string& name) {
  const auto bytes = static_cast<std::int64_t>(tensor.element_size());
  std::int64_t last = tensor.storage_offset();
  for (std::int64_t dim = 0; dim < tensor.dim(); ++dim) {
    last += (tensor.size(dim) - 1) * tensor.stride(dim);
  }
  return {{tensor.storage_offset() * bytes, (last + 1) * bytes}, name, tensor};
}

/// Whether both show a common element of their storage. Columns of one matrix do not, though their
/// ranges intersect.
bool overlap(const Extent& one, const Extent& other) {
  if (layout::intersect(one.bytes, other.bytes).empty()) return false;
  const auto bytes = static_cast<std::int64_t>(one.tensor.element_size());
  if (other.tensor.element_size() != one.tensor.element_size()) return true;
  const auto begin = std::min(one.bytes.begin, other.bytes.begin) / bytes;
  const auto marks =
      at::zeros({std::max(one.bytes.end, other.bytes.end) / bytes - begin}, at::kByte);
  const auto in_marks = [&](const at::Tensor& tensor) {
    auto sizes = tensor.sizes().vec();
    for (std::size_t dim = 0; dim < sizes.size(); ++dim) {
      if (tensor.strides()[dim] == 0) sizes[dim] = 1;  // expanded: one element
    }
    return marks.as_strided(sizes, tensor.strides(), tensor.storage_offset() - begin);
  };
  in_marks(one.tensor).fill_(1);
  return in_marks(other.tensor).any().item<bool>();
}

/// Whether its memory was freed when another parameter that shared it was sharded.
bool is_freed(const at::Tensor& tensor) {
  if (tensor.numel() == 0 || tensor.storage().nbytes() == 0) return false;
  try {
    (void)tensor.storage().data();
    return false;
  } catch (const std::exception&) {
    return true;
  }
}

/// Returns the grad_dtype that the user has set, if any; grad_dtype() returns the tensor's dtype
/// otherwise.
std::optional<DType> own_grad_dtype(const at::Tensor& tensor) {
  const auto* autograd = torch::autograd::impl::get_autograd_meta(tensor);
  if (autograd == nullptr || !autograd->grad_dtype_) return std::nullopt;
  return to_dtype(*autograd->grad_dtype_);
}

class Walk {
 public:
  explicit Walk(const ShardOptions& options)
      : ignored_(options.ignored_parameters),
        layouts_(options.layouts),
        unstored_(options.unstored_buffers.begin(), options.unstored_buffers.end()) {
    for (const auto& group : options.tied) {
      for (const auto& path : group) {
        TESSERA_CHECK(tied_.emplace(path, groups_).second, ErrorKind::kContract,
                      "ShardOptions::tied: found ", path, " twice, expected each path once");
      }
      ++groups_;
    }
    for (const auto& handle : options.inner) {
      held_.emplace(handle->held().get(), handle);
      // These modules are reached through the handle only, wherever they are in the tree.
      const bool is_named = !handle->unit()->name().empty();
      for (const auto& part : handle->held()->modules(/*include_self=*/false)) {
        modules_.insert(part.get());
        if (is_named) named_elsewhere_.insert(part.get());
      }
    }
  }

  /// Adds the handles whose modules are in the tree without their handle.
  void add_the_rest(const ShardOptions& options) {
    for (const auto& handle : options.inner) {
      add_handle(handle, handle->unit()->name());
    }
  }

  void visit(torch::nn::Module& module, const std::string& path) {
    if (named_elsewhere_.count(&module) > 0) return;
    const bool is_new = modules_.insert(&module).second;  // else it only gets further names
    for (const auto& entry : module.named_parameters(/*recurse=*/false)) {
      const auto name = path + entry.key();
      if (is_new) add(entry.value(), name, declared_of(module, entry.key(), name));
      if (auto leaf = leaf_for(entry.value())) found.places.push_back({name, std::move(leaf)});
    }
    for (const auto& entry : module.named_buffers(/*recurse=*/false)) {
      if (is_new) add_buffer(entry.value(), path + entry.key());
      found.places.push_back({path + entry.key(), nullptr, entry.value()});
    }
    for (const auto& entry : module.named_children()) {
      const auto name = path + entry.key();
      auto handle = std::dynamic_pointer_cast<ShardedBase>(entry.value());
      if (const auto held = held_.find(entry.value().get()); held != held_.end())
        handle = held->second;
      if (handle) {
        add_handle(handle, name);
      } else {
        visit(*entry.value(), name + ".");
      }
    }
  }

  /// Requires that tensors which are not sharded have no memory that sharding frees.
  void check_memory_of_the_rest() const {
    for (const auto& buffer : found.buffers)
      check_outside(buffer.tensor, "buffer " + buffer.meta.name);
    for (const auto& tensor : ignored_) {
      if (tensor.defined()) check_outside(tensor, "a tensor of ShardOptions::ignored_parameters");
    }
  }

  void check_layouts_used() const {
    for (const auto& [path, layout] : layouts_) {
      TESSERA_CHECK(declared_.count(path) > 0, ErrorKind::kContract,
                    "ShardOptions::layouts: found ", path,
                    ", expected the path of a parameter in the module");
    }
  }

  void check_tied_used() const {
    for (const auto& [path, group] : tied_) {
      TESSERA_CHECK(tied_met_.count(path) > 0, ErrorKind::kContract, "ShardOptions::tied: found ",
                    path,
                    ", expected the path of a parameter in the module that no unit inside has and "
                    "that is not ignored");
    }
  }

  void check_unstored_used() const {
    for (const auto& path : unstored_) {
      TESSERA_CHECK(unstored_met_.count(path) > 0, ErrorKind::kContract,
                    "ShardOptions::unstored_buffers: found ", path,
                    ", expected the path of a buffer in the module that no unit inside has");
    }
  }

  Found found;

 private:
  void add_handle(const std::shared_ptr<ShardedBase>& handle, const std::string& path) {
    const bool is_new = modules_.insert(handle.get()).second;
    if (is_new) found.handles.push_back({path, handle});
    // A handle that was given a name has that name in every place.
    if (is_new || handle->unit()->name().empty()) {
      found.places.push_back({path, nullptr, {}, handle});
    }
  }

  /// Returns the leaf of a tensor that add() has seen; null where the tensor is not sharded.
  std::shared_ptr<Leaf> leaf_for(const at::Tensor& tensor) const {
    if (!tensor.defined() || ignores(tensor)) return nullptr;
    if (auto leaf = find_leaf(tensor)) return leaf;
    const auto known = by_identity_.find(identity_of(tensor));
    return known == by_identity_.end() ? nullptr : found.parameters[known->second].leaves.front();
  }

  /// Returns the layout that its module declares, else that of the options.
  std::optional<ParameterLayout> declared_of(const torch::nn::Module& module,
                                             const std::string& parameter,
                                             const std::string& name) {
    std::optional<ParameterLayout> declared;
    if (const auto* speaks = dynamic_cast<const DeclaresLayouts*>(&module); speaks != nullptr) {
      declared = speaks->layout_of(parameter);
    }
    const auto given = layouts_.find(name);
    if (given == layouts_.end()) return declared;
    declared_.insert(name);
    TESSERA_CHECK(!declared || *declared == given->second, ErrorKind::kContract, "parameter ", name,
                  ": found the placement ", to_string(given->second),
                  " in ShardOptions::layouts and ", to_string(*declared),
                  " by its module, expected one of them; change one or leave it out");
    return given->second;
  }

  void check_outside(const at::Tensor& tensor, const std::string& what) const {
    if (tensor.numel() == 0 || !tensor.has_storage()) return;
    const auto claimed = memory_.find(tensor.storage().unsafeGetStorageImpl());
    TESSERA_CHECK(claimed == memory_.end(), ErrorKind::kContract, "parameter ",
                  claimed->second.front().name, ": found memory that it shares with ", what,
                  ", which is not sharded, expected memory of its own; clone() one of them before");
  }

  bool ignores(const at::Tensor& tensor) const {
    return std::any_of(ignored_.begin(), ignored_.end(),
                       [&](const auto& t) { return t.is_same(tensor); });
  }

  void add(const at::Tensor& tensor, const std::string& name,
           const std::optional<ParameterLayout>& declared) {
    if (!tensor.defined()) return;
    if (ignores(tensor)) return note_ignored(tensor, name);
    if (auto leaf = find_leaf(tensor)) {
      TESSERA_CHECK(leaf->owner != nullptr, ErrorKind::kUsage, "parameter ", name,
                    ": found one that was sharded by a handle that is gone, expected one with "
                    "values; make the "
                    "module again");
      found.owned_by_others.push_back(std::move(leaf));
      return;
    }
    TESSERA_CHECK(tensor.layout() == c10::kStrided, ErrorKind::kContract, "parameter ", name,
                  ": found layout ", tensor.layout(), ", expected a dense one");
    TESSERA_CHECK(tensor.is_leaf(), ErrorKind::kContract, "parameter ", name,
                  ": found a tensor that autograd computed, expected a leaf");
    TESSERA_CHECK(!tensor.grad().defined(), ErrorKind::kUsage, "parameter ", name,
                  ": found a gradient, expected none before sharding; call zero_grad() first");
    TESSERA_CHECK(!grad::has_hooks(tensor), ErrorKind::kUsage, "parameter ", name,
                  ": found a hook on its gradient, expected none, since gradients are summed over "
                  "the ranks before they are read; make the module without, and change "
                  "gradients on the handle's parameters after backward");
    TESSERA_CHECK(!is_freed(tensor), ErrorKind::kContract, "parameter ", name,
                  ": found that the memory which it shared with another one went when that was "
                  "sharded, expected memory of its own; shard tied parameters in one call, or give "
                  "each its own by clone() before");
    const auto identity = identity_of(tensor);
    tie(tensor, identity, name);
    const auto known = by_identity_.find(identity);
    if (known != by_identity_.end()) {
      alias(found.parameters[known->second], tensor, name);
      tie_layouts(found.parameters[known->second], name, declared);
      return;
    }
    claim_memory(tensor, name);
    by_identity_.emplace(identity, found.parameters.size());
    FoundParameter parameter;
    parameter.declared = declared;
    auto& meta = parameter.meta;
    meta.name = name;
    meta.shape = tensor.sizes().vec();
    meta.dtype = to_dtype(tensor.scalar_type());
    meta.trainable = tensor.requires_grad();
    meta.user_grad_dtype = own_grad_dtype(tensor);  // a rule may make a frozen parameter trainable
    parameter.leaves.push_back(leaf_of(tensor, name));
    found.parameters.push_back(std::move(parameter));
  }

  /// Registers a tensor of a group in options.tied as the first parameter of its group, also where
  /// the two share no memory.
  void tie(const at::Tensor& tensor, const Identity& identity, const std::string& name) {
    const auto tied = tied_.find(name);
    if (tied == tied_.end()) return;
    tied_met_.insert(name);
    const auto known = by_identity_.find(identity);
    const auto here = known == by_identity_.end() ? found.parameters.size() : known->second;
    const auto [first, is_first] = first_of_group_.emplace(tied->second, here);
    if (is_first || first->second == here) return;
    const auto& other = found.parameters[first->second];
    const auto what = concat("tied parameters ", other.meta.name, " and ", name);
    TESSERA_CHECK(known == by_identity_.end(), ErrorKind::kContract, what,
                  ": found that the second is tied to ", found.parameters[here].meta.name,
                  " by its memory, expected it in that group of ShardOptions::tied");
    TESSERA_CHECK(other.meta.shape == tensor.sizes().vec(), ErrorKind::kContract, what,
                  ": found the shapes ", at::IntArrayRef(other.meta.shape), " and ", tensor.sizes(),
                  ", expected one");
    TESSERA_CHECK(!has_values(tensor) && !has_values(other.leaves.front()->tensor),
                  ErrorKind::kContract, what,
                  ": found values that are not in one memory, expected none or the same memory; "
                  "give both the same storage, or load values after fully_shard");
    by_identity_.emplace(identity, first->second);
  }

  static bool has_values(const at::Tensor& tensor) {
    return tensor.numel() > 0 && tensor.storage().nbytes() > 0;
  }

  void note_ignored(const at::Tensor& tensor, const std::string& name) {
    if (ignored_met_.insert(tensor.unsafeGetTensorImpl()).second) found.ignored.push_back(name);
  }

  void add_buffer(const at::Tensor& tensor, const std::string& name) {
    const bool stored = unstored_.count(name) == 0;
    if (!stored) unstored_met_.insert(name);
    if (!tensor.defined()) return;
    if (ignores(tensor)) return note_ignored(tensor, name);
    if (const auto known = buffers_.find(tensor.unsafeGetTensorImpl()); known != buffers_.end()) {
      if (known->second < found.buffers.size()) {
        auto& first = found.buffers[known->second].meta;
        first.stored = first.stored || stored;
      }
      return;
    }
    buffers_.emplace(tensor.unsafeGetTensorImpl(), kNone);
    const auto dtype = tensor.scalar_type();
    if (c10::isComplexType(dtype) || c10::isQIntType(dtype)) return;  // nothing would cast them
    FoundBuffer buffer;
    buffer.meta.name = name;
    buffer.meta.shape = tensor.sizes().vec();
    buffer.meta.dtype = to_dtype(dtype);
    buffer.meta.stored = stored;
    buffer.tensor = tensor;
    buffers_[tensor.unsafeGetTensorImpl()] = found.buffers.size();
    found.buffers.push_back(std::move(buffer));
  }

  /// Refuses two different views of the same elements, since each parameter gets separate memory.
  void claim_memory(const at::Tensor& tensor, const std::string& name) {
    if (tensor.numel() == 0) return;
    const auto mine = extent_of(tensor, name);
    auto& claimed = memory_[tensor.storage().unsafeGetStorageImpl()];
    for (const auto& other : claimed) {
      TESSERA_CHECK(!overlap(mine, other), ErrorKind::kContract, "parameters ", other.name, " and ",
                    name,
                    ": found two views of the same memory with other shapes or strides, expected "
                    "the same tensor or memory of their own; register one of them, and make the "
                    "other from it in forward");
    }
    claimed.push_back(mine);
  }

  void alias(FoundParameter& parameter, const at::Tensor& tensor, const std::string& name) {
    auto& meta = parameter.meta;
    TESSERA_CHECK(meta.dtype == to_dtype(tensor.scalar_type()), ErrorKind::kContract,
                  "tied parameters ", meta.name, " and ", name, ": found dtypes ",
                  to_string(meta.dtype), " and ", c10::toString(tensor.scalar_type()),
                  ", expected one");
    TESSERA_CHECK(meta.trainable == tensor.requires_grad(), ErrorKind::kContract,
                  "tied parameters ", meta.name, " and ", name,
                  ": found one frozen and one trainable, expected the same");
    const auto own = own_grad_dtype(tensor);
    const auto text = [](const std::optional<DType>& dtype) {
      return dtype ? to_string(*dtype) : std::string_view("none");
    };
    TESSERA_CHECK(own == meta.user_grad_dtype, ErrorKind::kContract, "tied parameters ", meta.name,
                  " and ", name, ": found the grad_dtypes ", text(meta.user_grad_dtype), " and ",
                  text(own), ", expected the same; set it on both");
    meta.aliases.push_back(name);
    for (const auto& leaf : parameter.leaves) {
      if (leaf->tensor.is_same(tensor)) {
        meta.single_tensor_aliases = true;  // autograd sums its uses in one forward
        return;
      }
    }
    parameter.leaves.push_back(leaf_of(tensor, name));
  }

  /// Takes the layout of a tied parameter from any of its modules. Those that declare one must
  /// agree.
  static void tie_layouts(FoundParameter& parameter, const std::string& name,
                          const std::optional<ParameterLayout>& declared) {
    if (!declared) return;
    TESSERA_CHECK(!parameter.declared || *parameter.declared == *declared, ErrorKind::kContract,
                  "tied parameters ", parameter.meta.name, " and ", name, ": found the placements ",
                  to_string(*parameter.declared), " and ", to_string(*declared),
                  ", expected one; change what one of the modules declares");
    parameter.declared = declared;
  }

  static std::shared_ptr<Leaf> leaf_of(const at::Tensor& tensor, const std::string& name) {
    auto leaf = std::make_shared<Leaf>();
    leaf->tensor = tensor;
    leaf->name = name;
    return leaf;
  }

  const std::vector<at::Tensor>& ignored_;
  const std::map<std::string, ParameterLayout>& layouts_;
  std::set<std::string> declared_;  // paths of layouts_ that were found
  std::map<const torch::nn::Module*, std::shared_ptr<ShardedBase>> held_;
  std::set<const void*> modules_;
  std::set<const void*> named_elsewhere_;  // parts of handles with a given name
  static constexpr auto kNone = ~std::size_t{0};
  std::map<const void*, std::size_t> buffers_;  // index in found.buffers; kNone: not sharded
  std::set<std::string> unstored_, unstored_met_;
  std::map<std::string, std::size_t> tied_;  // number of the group, by path
  std::size_t groups_ = 0;
  std::set<std::string> tied_met_;
  std::map<std::size_t, std::size_t> first_of_group_;  // index in found.parameters
  std::set<const void*> ignored_met_;
  std::map<Identity, std::size_t> by_identity_;
  std::map<const void*, std::vector<Extent>> memory_;  // by storage
};

}  // namespace

Found collect(torch::nn::Module& module, const ShardOptions& options) {
  Walk walk(options);
  walk.visit(module, "");
  walk.add_the_rest(options);
  walk.check_layouts_used();
  walk.check_tied_used();
  walk.check_unstored_used();
  walk.check_memory_of_the_rest();
  return std::move(walk.found);
}

}  // namespace tessera::fsdp
