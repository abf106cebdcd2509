#include "parallel/axis.h"

#include <ATen/record_function.h>

#include <utility>

#include "tessera/error.h"

namespace tessera::parallel {
namespace {

struct KindOf {
  comm::Kind operator()(const comm::AllGather&) const { return comm::Kind::kAllGather; }
  comm::Kind operator()(const comm::ReduceScatter&) const { return comm::Kind::kReduceScatter; }
  comm::Kind operator()(const comm::AllReduce&) const { return comm::Kind::kAllReduce; }
  comm::Kind operator()(const comm::AllToAll&) const { return comm::Kind::kAllToAll; }
};

}  // namespace

Axis::Axis(std::shared_ptr<comm::Group> group, std::string name, std::optional<at::ScalarType> sums)
    : group_(std::move(group)), name_(std::move(name)), sums_(sums) {}

void Axis::run(comm::Op op, const char* what) const {
  TESSERA_INVARIANT(size() > 1, "a collective of one rank");
  RECORD_USER_SCOPE("tessera::wait");
  comm::Batch batch;
  batch.label.kind = std::visit(KindOf{}, op);
  batch.label.unit = concat(name_, ", ", what);
  batch.ops.push_back(std::move(op));
  group_->issue(std::move(batch))->wait();
}

}  // namespace tessera::parallel
