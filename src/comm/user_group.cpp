// Collectives for users, over the queue that sharding uses (queue.h), on separate groups.
#include <ATen/ops/amax.h>
#include <ATen/ops/amin.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/sum.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <array>

#include "base/text/printable.h"
#include "comm/group.h"
#include "comm/host_read.h"
#include "comm/queue.h"
#include "kernels/kernels.h"
#include "tessera/error.h"
#include "tessera/group.h"
#include "tessera/mesh.h"
#include "tessera/world.h"

namespace tessera {
namespace {

constexpr std::array kDtypes = {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16, at::kLong,
                                at::kInt,    at::kShort, at::kChar, at::kByte,     at::kBool};

/// The dtype in which sums are formed.
at::ScalarType sum_dtype(at::ScalarType dtype) {
  return dtype == at::kBFloat16 || dtype == at::kHalf ? at::kFloat : dtype;
}

/// An operation in which every rank waits for every other rank.
comm::Op everyones(at::Device device) {
  return comm::AllReduce{
      at::ones({1}, at::TensorOptions().device(device)), {}, comm::Route::kRelayed};
}

at::Tensor flat(const at::Tensor& tensor) { return tensor.detach().view({-1}); }

std::string_view to_string(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return "sum";
    case ReduceOp::kMax:
      return "max";
    case ReduceOp::kMin:
      return "min";
  }
  return "unknown";
}

/// Tells autograd that memory was written without it.
void wrote(const at::Tensor& tensor) {
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

}  // namespace

/// One call, as it is compared over ranks and named in errors.
struct Group::Call {
  Call(const Group& called, comm::Kind of_kind, const std::string& named)
      : group(called), kind(of_kind), what(named) {}

  /// "all_reduce of loss".
  std::string text() const {
    return what.empty() ? std::string(to_string(kind)) : concat(to_string(kind), " of ", what);
  }

  void require_usable(const at::Tensor& tensor) const;
  void run(comm::Op op) const { run(std::vector{std::move(op)}); }
  void run(std::vector<comm::Op> ops) const;

  const Group& group;
  comm::Kind kind;
  std::string what;
  std::string how = {};  ///< what ranks have to agree on in addition to bytes and dtype
};

void Group::Call::require_usable(const at::Tensor& tensor) const {
  TESSERA_CHECK(tensor.defined(), ErrorKind::kUsage, text(),
                ": found an undefined tensor, expected one with values");
  TESSERA_CHECK(tensor.layout() == c10::kStrided, ErrorKind::kUsage, text(), ": found a ",
                tensor.layout(), " tensor, expected a dense one; give x.to_dense()");
  const World& world = *group.world_;
  const bool anywhere = world.size() == 1 && tensor.device().type() != at::kMeta;
  TESSERA_CHECK(anywhere || tensor.device() == world.device(), ErrorKind::kUsage, text(),
                ": found a tensor on ", tensor.device(), ", expected one on ", world.device(),
                " (backend ", world.backend(), "); move it with x.to()");
  TESSERA_CHECK(
      std::find(kDtypes.begin(), kDtypes.end(), tensor.scalar_type()) != kDtypes.end(),
      ErrorKind::kUsage, text(), ": found the dtype ", c10::toString(tensor.scalar_type()),
      ", expected Double, Float, Half, BFloat16, Long, Int, Short, Char, Byte or Bool; give a view "
      "or a copy of such a dtype");
  TESSERA_CHECK(tensor.is_contiguous(), ErrorKind::kUsage, text(), ": found sizes ", tensor.sizes(),
                " with strides ", tensor.strides(),
                ", expected a contiguous tensor; give x.contiguous()");
  TESSERA_CHECK(!(tensor.requires_grad() && at::GradMode::is_enabled()), ErrorKind::kUsage, text(),
                ": found a tensor that requires grad, expected one that does not: no gradient "
                "passes through a collective; give x.detach(), or call it without grad mode");
  static_cast<void>(tensor.const_data_ptr());  // throws for released storage, naming its owner
}

void Group::Call::run(std::vector<comm::Op> ops) const {
  RECORD_USER_SCOPE("tessera::wait");
  comm::Batch batch;
  batch.label.kind = kind;
  batch.label.unit = what.empty() ? "an unnamed call" : what;
  batch.label.controls = how;
  batch.ops = std::move(ops);
  World& world = *group.world_;
  try {
    world.queue().submit(*group.group_, std::move(batch)).wait();
  } catch (const std::exception& error) {
    // Every later collective would meet other collectives on the other ranks.
    if (world.size() > 1 && !world.aborted()) world.abort(one_line(error.what()));
    throw;
  }
}

Group::Group(std::shared_ptr<World> world, std::vector<int> ranks)
    : world_(std::move(world)), ranks_(std::move(ranks)), group_(world_->group(ranks_, "user")) {}

int Group::rank() const { return group_->rank(); }

at::Tensor Group::summed(const Call& call, const at::Tensor& tensor) const {
  const at::ScalarType wide = sum_dtype(tensor.scalar_type());
  const at::Tensor sums = at::empty({tensor.numel()}, tensor.options().dtype(wide));
  call.run(comm::AllReduce{flat(tensor), sums, comm::Route::kRelayed});
  return sums.view(tensor.sizes());
}

at::Tensor Group::gathered(const Call& call, const at::Tensor& tensor) const {
  std::vector<std::int64_t> sizes = tensor.sizes().vec();
  sizes.insert(sizes.begin(), size());
  at::Tensor all = at::empty(sizes, tensor.options());
  all.select(0, rank()).copy_(tensor);
  call.run(comm::AllGather{all});
  return all;
}

void Group::all_reduce(const at::Tensor& tensor, ReduceOp op, const std::string& what) const {
  Call call(*this, comm::Kind::kAllReduce, what);
  call.require_usable(tensor);
  const c10::AutoGradMode no_grad(false);
  const at::ScalarType dtype = tensor.scalar_type();
  TESSERA_CHECK(op != ReduceOp::kSum || dtype != at::kBool, ErrorKind::kUsage, call.text(),
                ": found a sum of Bool, expected ReduceOp::kMax (any) or kMin (all); for a count "
                "give x.to(at::kLong)");
  call.how = concat(to_string(op), " of ", tensor.sizes());
  if (op != ReduceOp::kSum) {
    const at::Tensor all = gathered(call, tensor);
    tensor.copy_(op == ReduceOp::kMax ? at::amax(all, 0) : at::amin(all, 0));
  } else if (sum_dtype(dtype) != dtype) {
    tensor.copy_(summed(call, tensor));
  } else if (kernels::can_sum(dtype, dtype)) {
    call.run(comm::AllReduce{flat(tensor), {}, comm::Route::kRelayed});
    wrote(tensor);
  } else {
    tensor.copy_(at::sum(gathered(call, tensor), {0}, /*keepdim=*/false, dtype));
  }
}

at::Tensor Group::mean(const at::Tensor& tensor, const std::string& what) const {
  Call call(*this, comm::Kind::kAllReduce, what.empty() ? "a mean" : what);
  call.require_usable(tensor);
  const c10::AutoGradMode no_grad(false);
  TESSERA_CHECK(tensor.is_floating_point(), ErrorKind::kUsage, call.text(), ": found the dtype ",
                c10::toString(tensor.scalar_type()),
                ", expected a floating one; give x.to(at::kDouble)");
  call.how = concat("mean of ", tensor.sizes());
  // A sum may not fit into 16 bits where its mean does, so it is not rounded on the way.
  const at::Tensor wide = tensor.to(sum_dtype(tensor.scalar_type()));
  if (!wide.is_same(tensor)) call.how += concat(" ", c10::toString(tensor.scalar_type()));
  return summed(call, wide).div_(size()).to(tensor.scalar_type());
}

double Group::mean(double value, const std::string& what) const {
  const auto options = at::TensorOptions().dtype(at::kDouble).device(world_->device());
  return comm::read_on_host(mean(at::full({}, value, options), what), what).item<double>();
}

std::vector<at::Tensor> Group::all_gather(const at::Tensor& tensor, const std::string& what) const {
  Call call(*this, comm::Kind::kAllGather, what);
  call.require_usable(tensor);
  const c10::AutoGradMode no_grad(false);
  call.how = concat("from each ", tensor.sizes());
  return gathered(call, tensor).unbind(0);
}

void Group::broadcast(const at::Tensor& tensor, int group_src, const std::string& what) const {
  Call call(*this, comm::Kind::kBroadcast, what);
  call.require_usable(tensor);
  const c10::AutoGradMode no_grad(false);
  TESSERA_CHECK(group_src >= 0 && group_src < size(), ErrorKind::kUsage, call.text(),
                ": found group_src ", group_src, ", expected an index into the ", size(),
                " ranks of the group, from 0");
  call.how = concat("from rank ", ranks_[static_cast<std::size_t>(group_src)], " ", tensor.sizes());
  // A source has nothing to wait for: by itself it would continue, even if the other ranks call
  // something else.
  call.run({comm::Broadcast{flat(tensor), group_src}, everyones(tensor.device())});
  wrote(tensor);
}

void Group::barrier(const std::string& what) const {
  const Call call(*this, comm::Kind::kBarrier, what);
  const c10::AutoGradMode no_grad(false);
  const comm::Op come = everyones(world_->device());
  call.run(come);
  comm::read_on_host(comm::first_tensor(come), call.text());  // on a device only a stream waits
}

Group World::group() { return Group(shared_from_this(), comm::all_ranks(size_)); }

Group Mesh::group(std::string_view axis) const { return group({axis}); }

Group Mesh::group(std::initializer_list<std::string_view> axes) const {
  TESSERA_CHECK(world_ != nullptr, ErrorKind::kUsage, "mesh: found no world, expected one");
  return Group(world_, ranks_of(axes));
}

}  // namespace tessera
