#include "fsdp/optim/optimizer_shards.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "base/test_hooks.h"
#include "kernels/kernels.h"

namespace tessera::fsdp {
namespace {

at::Tensor scratch(at::Tensor& memory, std::int64_t numel, at::Device device) {
  if (!memory.defined() || memory.numel() < numel) {
    memory = at::empty({numel}, at::TensorOptions().dtype(at::kFloat).device(device));
  }
  return memory.narrow(0, 0, numel);
}

std::int64_t part_of(const at::Tensor& shard) {
  const auto of_test = test_hooks::elements_at_a_time.get();
  return of_test ? (*of_test)() : shard.is_cpu() ? kMasterPart : kMasterPartOfDevices;
}

}  // namespace

at::Tensor MasterOfShard::make(const ShardView& view) {
  const auto shard = view.shard.detach();
  switch (view.contract->master) {
    case Master::kRemainder:
      return at::zeros(shard.sizes(), shard.options().dtype(at::kShort));
    case Master::kCopy:
      return shard.to(at::kFloat);
    case Master::kNone:
    case Master::kStorage:
      break;
  }
  return {};
}

const char* MasterOfShard::name(Master master) {
  if (master == Master::kRemainder) return "master_remainder";
  return master == Master::kCopy ? "master" : "";
}

std::optional<DType> MasterOfShard::dtype(Master master) {
  if (master == Master::kRemainder) return DType::kInt16;
  return master == Master::kCopy ? std::optional(DType::kFloat32) : std::nullopt;
}

void MasterOfShard::step(const ShardView& view, const at::Tensor& kept, bool changed,
                         const std::function<void(const Stepped&)>& update) {
  if (view.shard.numel() == 0) return;
  switch (view.contract->master) {
    case Master::kRemainder:
      if (changed) kept.zero_();
      return step_split(view, kept, update);
    case Master::kCopy:
      return step_copy(view, kept, update);
    case Master::kNone:
    case Master::kStorage:
      break;
  }
  update({view.shard.detach(), view.shard.grad(), {0, view.shard.numel()}});
}

void MasterOfShard::step_split(const ShardView& view, const at::Tensor& remainder,
                               const std::function<void(const Stepped&)>& update) {
  const auto shard = view.shard.detach();
  const auto numel = shard.numel();
  const auto part = part_of(shard);
  for (std::int64_t begin = 0; begin < numel; begin += part) {
    const auto size = std::min(part, numel - begin);
    const auto stored = shard.narrow(0, begin, size);
    const auto rest = remainder.narrow(0, begin, size);
    const auto values = scratch(values_, size, shard.device());
    kernels::join_master(stored, rest, values);
    update({values, widened(view.shard.grad().narrow(0, begin, size)), {begin, begin + size}});
    kernels::split_master(values, stored, rest);
  }
}

void MasterOfShard::step_copy(const ShardView& view, const at::Tensor& master,
                              const std::function<void(const Stepped&)>& update) {
  const auto shard = view.shard.detach();
  // Takes over elements of the shard that were written since the master was rounded into it.
  kernels::take_over_changes(shard, master);
  update({master, widened(view.shard.grad()), {0, shard.numel()}});
  shard.copy_(master);
}

at::Tensor MasterOfShard::widened(const at::Tensor& gradient) {
  if (gradient.scalar_type() == at::kFloat) return gradient;
  return scratch(gradient_, gradient.numel(), gradient.device()).copy_(gradient);
}

}  // namespace tessera::fsdp
