#include "tessera/world.h"

#include <algorithm>
#include <numeric>

#include "base/environment.h"
#include "comm/batch.h"
#include "comm/process_world.h"
#include "comm/queue.h"
#include "comm/slurm_hosts.h"
#include "comm/world_state.h"
#include "tessera/error.h"

namespace tessera {
namespace {

// Up to here a group's ranks are named one by one.
constexpr std::size_t kNamedRanks = 8;

/// "gather of ranks 0,1", "gather of ranks 0 to 1023", "gather of ranks 3 to 1019 by 8": others for
/// others.
std::string group_name(const std::vector<int>& ranks, std::string_view purpose) {
  std::string name = concat(purpose, " of ranks ", ranks.front());
  if (ranks.size() > kNamedRanks) {
    const int step = ranks[1] - ranks[0];
    const auto uneven = std::adjacent_find(ranks.begin(), ranks.end(),
                                           [&](int one, int next) { return next - one != step; });
    if (uneven == ranks.end()) {
      return concat(name, " to ", ranks.back(), step == 1 ? "" : concat(" by ", step));
    }
  }
  for (std::size_t i = 1; i < ranks.size(); ++i) name += concat(",", ranks[i]);
  return name;
}

/// Nobody to talk to: every group has one rank, nothing is lost by a failure elsewhere.
class SoloWorld : public World {
 public:
  SoloWorld() : World(0, 1, 0) {}
  ~SoloWorld() override { stop_queue(); }
  std::string backend() const override { return "none"; }
  void poison(const std::string& why) override {
    state_->poison->mark(why);
    queue_->poison(why);
  }
  void recover() override {
    queue_->recover();
    ++recoveries_;
    state_->poison->clear();
  }

 protected:
  std::shared_ptr<comm::Group> make_group(const std::vector<int>&,
                                          const std::string& name) override {
    return std::make_shared<comm::SoloGroup>(name, state_->poison);
  }
};

}  // namespace

World::World(int rank, int size, int local_rank)
    : rank_(rank),
      size_(size),
      local_rank_(local_rank),
      state_(std::make_unique<State>()),
      queue_(std::make_unique<comm::IssueQueue>()) {}

World::~World() = default;

std::shared_ptr<World> World::connect(const WorldOptions& options) {
  auto launch = comm::read_launch_environment(base::environment(),
                                              {options.master_addr, options.master_port});
  TESSERA_CHECK(options.backend == "auto" || options.backend == "gloo" || options.backend == "nccl",
                ErrorKind::kUsage, "world: found backend ", options.backend,
                ", expected auto, gloo or nccl");
  if (launch.world_size == 1) return std::make_shared<SoloWorld>();
  comm::find_first_host(launch, comm::kScontrolPatience);
  return std::make_shared<comm::ProcessWorld>(launch, options);
}

Mesh World::mesh(const MeshShapes& shapes) { return Mesh(shared_from_this(), shapes); }

std::shared_ptr<comm::Group> World::group(const std::vector<int>& ranks, std::string_view purpose) {
  TESSERA_CHECK(!ranks.empty(), ErrorKind::kUsage, "group: found no ranks for ", purpose,
                ", expected at least one");
  const std::string name = group_name(ranks, purpose);
  TESSERA_CHECK(
      std::adjacent_find(ranks.begin(), ranks.end(), std::greater_equal<>()) == ranks.end() &&
          ranks.front() >= 0 && ranks.back() < size_ &&
          std::find(ranks.begin(), ranks.end(), rank_) != ranks.end(),
      ErrorKind::kUsage, "group: found ", name, ", expected ascending ranks below ", size_,
      " with rank ", rank_, " among them");
  const std::lock_guard lock(state_->mutex);
  auto& made = state_->made[name];
  if (!made) {
    made = ranks.size() == 1 ? std::make_shared<comm::SoloGroup>(name, state_->poison)
                             : make_group(ranks, name);
  }
  return made;
}

comm::Group& World::control() {
  std::vector<int> all(static_cast<std::size_t>(size_));
  std::iota(all.begin(), all.end(), 0);
  return *group(all, "control");
}

bool World::poisoned() const { return state_->poison->is_set(); }

void World::stop_queue() { queue_->stop(); }

bool launched() {
  return comm::read_launch_environment(base::environment()).launcher != comm::Launcher::kSingle;
}

}  // namespace tessera
