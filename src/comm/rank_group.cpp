#include "tessera/rank_group.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/amin.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <numeric>

#include "comm/group.h"
#include "kernels/kernels.h"
#include "tessera/error.h"
#include "tessera/mesh.h"
#include "tessera/world.h"

namespace tessera {
namespace {

// Up to here, in all, what is gathered is relayed (../docs/communication.md).
constexpr std::int64_t kRelayedBytes = 256 * 1024;

/// One call: what is said of it, and what it may be called with.
class Call {
 public:
  Call(std::string_view name, std::string_view what, const at::Tensor& data) : name_(name) {
    TESSERA_CHECK(data.defined(), ErrorKind::kUsage, name, of(what),
                  ": found an undefined tensor, expected values on every rank");
    TESSERA_CHECK(data.device().is_cpu(), ErrorKind::kUsage, name, of(what), ": found a tensor on ",
                  data.device().str(), ", expected one on the CPU; pass tensor.cpu()");
    TESSERA_CHECK(data.layout() == at::kStrided && !data.is_quantized(), ErrorKind::kUsage, name,
                  of(what), ": found a sparse or quantized tensor, expected a dense one");
    TESSERA_CHECK(!(at::GradMode::is_enabled() && data.requires_grad()), ErrorKind::kUsage, name,
                  of(what), ": found a tensor that requires grad, but a collective has no ",
                  "backward; pass tensor.detach(), or call it under torch::NoGradGuard");
    unit_ = concat(what.empty() ? "a tensor" : what, ", ", c10::toString(data.scalar_type()), " ",
                   data.sizes());
  }

  /// "loss, Float [2, 3]": compared over ranks with all that it says.
  const std::string& unit() const { return unit_; }
  std::string text() const { return concat(name_, " of ", unit_); }

  static std::string of(std::string_view what) {
    return what.empty() ? std::string() : concat(" of ", what);
  }

 private:
  std::string name_;
  std::string unit_;
};

void run(comm::Group& group, comm::Kind kind, comm::Op op, const std::string& unit) {
  comm::Batch batch;
  batch.label.kind = kind;
  batch.label.unit = unit;
  batch.ops.push_back(std::move(op));
  group.issue(std::move(batch))->wait();
}

/// Its memory as bytes, one axis. Contiguous.
at::Tensor bytes_of(const at::Tensor& tensor) { return tensor.view(-1).view(at::kByte); }

/// In which sums are formed.
at::ScalarType sum_dtype(at::ScalarType dtype) {
  return dtype == at::kHalf || dtype == at::kBFloat16 ? at::kFloat : dtype;
}

at::Tensor gather(comm::Group& group, const at::Tensor& data, const std::string& unit) {
  std::vector<std::int64_t> sizes{group.size()};
  sizes.insert(sizes.end(), data.sizes().begin(), data.sizes().end());
  at::Tensor all = at::empty(sizes, data.options().requires_grad(false));
  all[group.rank()].copy_(data);
  const auto bytes = static_cast<std::int64_t>(data.nbytes());
  if (bytes * group.size() > kRelayedBytes) {
    run(group, comm::Kind::kAllGather, comm::AllGather{all}, unit);
  } else {
    run(group, comm::Kind::kAllGather,
        comm::RelayedGather{bytes_of(all),
                            std::vector(static_cast<std::size_t>(group.size()), bytes)},
        unit);
  }
  return all;
}

/// What is written in place has a place for each value.
void require_writable(const Call& call, const at::Tensor& data) {
  TESSERA_CHECK(at::has_internal_overlap(data) != at::MemOverlap::Yes, ErrorKind::kUsage,
                call.text(), ": found a tensor whose elements share memory, expected one that can ",
                "be written; pass tensor.contiguous() and use that");
}

/// Autograd must not take what was written past it for unchanged.
void mark_changed(const at::Tensor& data) {
  if (!data.is_inference()) data.unsafeGetTensorImpl()->bump_version();
}

void require_reducible(const Call& call, const at::Tensor& data, ReduceOp op) {
  const at::ScalarType dtype = data.scalar_type();
  if (op == ReduceOp::kMean) {
    TESSERA_CHECK(at::isFloatingType(dtype), ErrorKind::kUsage, call.text(), ": found ",
                  c10::toString(dtype),
                  ", expected a floating-point dtype; pass tensor.to(torch::kDouble)");
  }
  const bool adds = op == ReduceOp::kSum || op == ReduceOp::kMean;
  TESSERA_CHECK(!adds || kernels::can_sum(dtype, sum_dtype(dtype)), ErrorKind::kUsage, call.text(),
                ": found ", c10::toString(dtype),
                ", which cannot be added here; expected a real dtype other than bool");
  TESSERA_CHECK(adds || !at::isComplexType(dtype), ErrorKind::kUsage, call.text(), ": found ",
                c10::toString(dtype), ", which has no order; expected a real dtype");
}

/// In a tensor of its own, in the dtype in which it was formed.
at::Tensor reduced(comm::Group& group, const at::Tensor& data, ReduceOp op,
                   const std::string& unit) {
  if (op == ReduceOp::kMax) return gather(group, data, unit).amax(0);
  if (op == ReduceOp::kMin) return gather(group, data, unit).amin(0);
  at::Tensor sum = at::empty(data.sizes(), data.options()
                                               .dtype(sum_dtype(data.scalar_type()))
                                               .requires_grad(false)
                                               .memory_format(at::MemoryFormat::Contiguous));
  run(group, comm::Kind::kAllReduce, comm::AllReduce{data.contiguous(), sum, comm::Route::kRelayed},
      unit);
  return op == ReduceOp::kMean ? sum.div_(group.size()) : sum;
}

}  // namespace

std::string_view to_string(ReduceOp op) {
  constexpr std::string_view kNames[] = {"sum", "mean", "max", "min"};
  return kNames[static_cast<std::size_t>(op)];
}

RankGroup::RankGroup(const std::shared_ptr<World>& world, std::vector<int> ranks)
    : world_(world), ranks_(std::move(ranks)) {
  TESSERA_CHECK(world_ != nullptr, ErrorKind::kUsage, "group: found no world");
  group_ = world_->group(ranks_, "user");
}

int RankGroup::rank() const { return group_->rank(); }
int RankGroup::size() const { return group_->size(); }

void RankGroup::all_reduce(const at::Tensor& data, ReduceOp op, std::string_view what) const {
  const Call call(concat("all_reduce (", to_string(op), ")"), what, data);
  require_writable(call, data);
  require_reducible(call, data, op);
  const std::string unit = concat(to_string(op), " of ", call.unit());
  const bool adds = op == ReduceOp::kSum || op == ReduceOp::kMean;
  const at::NoGradGuard no_grad;
  if (!adds || !data.is_contiguous() || sum_dtype(data.scalar_type()) != data.scalar_type()) {
    data.copy_(reduced(*group_, data, op, unit));
    return;
  }
  run(*group_, comm::Kind::kAllReduce, comm::AllReduce{data, {}, comm::Route::kRelayed}, unit);
  mark_changed(data);
  if (op == ReduceOp::kMean) data.div_(size());
}

at::Tensor RankGroup::mean(const at::Tensor& data, std::string_view what) const {
  const Call call("mean", what, data);
  require_reducible(call, data, ReduceOp::kMean);
  const at::NoGradGuard no_grad;
  return reduced(*group_, data, ReduceOp::kMean, concat("mean of ", call.unit()))
      .to(data.scalar_type());
}

double RankGroup::mean(double value, std::string_view what) const {
  return mean(at::full({}, value, at::kDouble), what.empty() ? "a number" : what).item<double>();
}

at::Tensor RankGroup::all_gather(const at::Tensor& data, std::string_view what) const {
  const Call call("all_gather", what, data);
  const at::NoGradGuard no_grad;
  return gather(*group_, data, call.unit());
}

void RankGroup::broadcast(const at::Tensor& data, int from, std::string_view what) const {
  const Call call("broadcast", what, data);
  TESSERA_CHECK(from >= 0 && from < size(), ErrorKind::kUsage, call.text(), ": found rank ", from,
                ", expected one of the group's ", size(), ", from 0");
  require_writable(call, data);
  const at::NoGradGuard no_grad;
  const at::Tensor sent = data.contiguous();
  std::vector<std::int64_t> lengths(static_cast<std::size_t>(size()), 0);
  lengths[static_cast<std::size_t>(from)] = static_cast<std::int64_t>(sent.nbytes());
  run(*group_, comm::Kind::kAllGather, comm::RelayedGather{bytes_of(sent), std::move(lengths)},
      concat("broadcast of ", call.unit(), " from rank ", from));
  if (rank() == from) return;
  if (!sent.is_same(data)) data.copy_(sent);
  mark_changed(data);
}

void RankGroup::barrier(std::string_view what) const {
  comm::barrier(*group_, what.empty() ? "a barrier" : std::string(what));
}

RankGroup World::group() {
  std::vector<int> all(static_cast<std::size_t>(size_));
  std::iota(all.begin(), all.end(), 0);
  return {shared_from_this(), std::move(all)};
}

RankGroup Mesh::group(std::string_view axis) const { return group_over({axis}); }

RankGroup Mesh::group_over(const std::vector<std::string_view>& axes) const {
  return {world_, ranks_of(axes)};
}

}  // namespace tessera
