#include "train/over_stages.h"

#include <ATen/ops/empty.h>

#include <cstddef>
#include <set>
#include <sstream>
#include <vector>

#include "comm/group.h"
#include "fsdp/handle.h"
#include "tessera/error.h"
#include "tessera/world.h"
#include "train/plan_of_run.h"

namespace tessera::train {
namespace {

using Visit = std::function<void(const std::string&, const at::Tensor&)>;

/// Gradients of one stage, on their way from its first rank to rank 0, if it is another one.
class StageGradients {
 public:
  StageGradients(const ShardedBase& model, int first_rank)
      : model_(model), world_(*model.mesh().world()), first_rank_(first_rank) {
    if (first_rank_ != 0 && (world_.rank() == 0 || world_.rank() == first_rank_)) {
      // Control: one thread, and nobody else is connected.
      pair_ = world_.group({0, first_rank_}, "gradients control");
    }
  }

  /// On the ranks of the stage.
  void send(const Visit& visit) {
    model_.visit_full_gradients([&](const std::string& name, const at::Tensor& gradient) {
      require_more();
      if (pair_ && world_.rank() != 0) send_one(name, gradient);
      visit(name, gradient);
    });
    more(false);
  }

  /// On all others: rank 0 visits what comes.
  void receive(const Visit& visit) {
    while (more(false)) {
      if (world_.rank() == 0) receive_one(visit);
    }
  }

 private:
  /// Whether the stage has another parameter. Collective over the world.
  bool more(bool mine) {
    return comm::any_of_ranks(world_.control(), {mine}, "gradients of a stage")[0];
  }
  void require_more() { TESSERA_INVARIANT(more(true), "a gradient that no rank has"); }

  void send_one(const std::string& name, const at::Tensor& gradient) {
    std::ostringstream head;
    head << static_cast<int>(gradient.scalar_type()) << ' ' << gradient.dim();
    for (const std::int64_t size : gradient.sizes()) head << ' ' << size;
    head << ' ' << name;
    comm::all_gather_bytes(*pair_, head.str(), "name of a gradient");
    move(name, gradient.contiguous());
  }

  void receive_one(const Visit& visit) {
    const auto heads = comm::all_gather_bytes(*pair_, "", "name of a gradient");
    std::istringstream head(heads.at(1));
    int dtype = 0;
    std::size_t dims = 0;
    head >> dtype >> dims;
    std::vector<std::int64_t> sizes(dims);
    for (std::int64_t& size : sizes) head >> size;
    std::string name;
    std::getline(head >> std::ws, name);
    const auto gradient =
        at::empty(sizes, at::TensorOptions().dtype(static_cast<at::ScalarType>(dtype)));
    move(name, gradient);
    visit(name, gradient);
  }

  void move(const std::string& name, const at::Tensor& gradient) {
    if (gradient.numel() == 0) return;
    comm::Batch batch;
    batch.label = {comm::Kind::kBroadcast, name + " (gradient of a stage)"};
    batch.ops.emplace_back(comm::Broadcast{gradient.view({-1}), 1});
    pair_->issue(std::move(batch))->wait();
  }

  const ShardedBase& model_;
  World& world_;
  int first_rank_;
  std::shared_ptr<comm::Group> pair_;  // of two different ranks, on these
};

}  // namespace

void visit_full_gradients_of_run(const ShardedBase& model, const Visit& visit) {
  const Mesh& mesh = model.mesh();
  if (mesh.size_of(axis::kPipeline) == 1) return model.visit_full_gradients(visit);
  std::set<std::string> seen;
  const Visit once = [&](const std::string& name, const at::Tensor& gradient) {
    if (seen.insert(name).second) visit(name, gradient);
  };
  const std::vector<int> firsts = mesh.shapes().ranks_of(0, {axis::kPipeline});
  const auto own = static_cast<std::size_t>(mesh.coordinate(axis::kPipeline));
  for (std::size_t stage = 0; stage < firsts.size(); ++stage) {
    StageGradients of_stage(model, firsts[stage]);
    stage == own ? of_stage.send(once) : of_stage.receive(once);
  }
}

std::uint64_t plan_hash_of_run(const ShardedBase& model) {
  const Mesh& mesh = model.mesh();
  const std::uint64_t own = layout::hash(fsdp::plan_of(model));
  if (mesh.size_of(axis::kPipeline) == 1) return own;
  const auto group = mesh.world()->group(mesh.ranks_of({axis::kPipeline}), "plan control");
  std::vector<std::uint64_t> all;
  for (const auto& text : comm::all_gather_bytes(*group, concat(own), "plans of the stages")) {
    all.push_back(std::stoull(text));
  }
  return stages_hash(all);
}

}  // namespace tessera::train
