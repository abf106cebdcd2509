#include "tessera/world.h"

#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/headeronly/version.h>

#include <algorithm>
#include <iostream>

#include "base/interrupt.h"
#include "base/log.h"
#include "base/text/printable.h"
#include "base/text/torch_minor.h"
#include "base/threads/parallel.h"
#include "comm/batch.h"
#include "comm/device.h"
#include "comm/failure_report.h"
#include "comm/process_world.h"
#include "comm/queue.h"
#include "comm/run_place.h"
#include "tessera/error.h"

namespace tessera {
namespace {

// Up to this number a group's ranks are named one by one.
constexpr std::size_t kNamedRanks = 8;

/// "gather of ranks 0,1", "gather of ranks 0 to 1023", "gather of ranks 3 to 1019 by 8": different
/// ranks have different names.
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

std::string work_key(int rank) { return concat("work/", rank); }

/// Returns what the rank has last said that it does; "" where the store does not answer: the text
/// omits it.
std::string work_of(comm::Store& store, int rank) {
  try {
    return store.find(work_key(rank)).value_or("");
  } catch (const Error&) {
    return {};
  }
}

/// "rank 2: hashing the data, ...": names the first few that are busy.
std::string works_of(comm::Store& store, int size) {
  constexpr int kNamed = 4;
  std::vector<std::string> named;
  int busy = 0;
  for (int rank = 0; rank < size; ++rank) {
    const std::string work = work_of(store, rank);
    if (!work.empty() && ++busy <= kNamed) named.push_back(concat("rank ", rank, ": ", work));
  }
  return concat(joined(named), busy > kNamed ? concat(" and ", busy - kNamed, " more") : "");
}

// Short compared with the minutes that big files take, long compared with a start that needs no
// message.
constexpr std::chrono::seconds kStartUpLine{10};

void require_libtorch_of_build() {
  Dl_info library{};
  ::dladdr(reinterpret_cast<const void*>(&aoti_torch_abi_version), &library);
  base::require_torch_minor(aoti_torch_abi_version(), TORCH_ABI_VERSION,
                            library.dli_fname == nullptr ? "" : library.dli_fname);
}

/// A World of one rank: every group has one rank, and no failure elsewhere matters.
class SoloWorld : public World {
 public:
  explicit SoloWorld(const WorldOptions& options) : World(0, 1, 0, options) {}
  ~SoloWorld() override { stop_queue(); }
  std::string backend() const override { return "none"; }
  void close() override {
    if (closed_.exchange(true)) return;
    queue_->close();
    state_->abort_flag->close();
  }
  void close_failed(const std::string& /*why*/) override { close(); }
  void abort_epoch(std::uint64_t epoch, const std::string& why) override {
    const base::Lock lock(epoch_mutex_);
    if (epoch != recoveries_ || closed_) return;
    state_->abort_flag->mark(one_line(why));
    queue_->abort(one_line(why));
  }
  void recover() override {
    state_->abort_flag->require_not_over();
    const base::Lock lock(epoch_mutex_);
    queue_->recover();
    ++recoveries_;
    state_->abort_flag->clear();
  }

 protected:
  std::shared_ptr<comm::Group> make_group(const std::vector<int>&, const std::string& name,
                                          const at::Device&) override {
    return std::make_shared<comm::SoloGroup>(name, state_->abort_flag);
  }

 private:
  base::Mutex epoch_mutex_;  ///< as ProcessWorld's
};

}  // namespace

World::State::Making::Making(State& state, std::string name)
    : state_(state), name_(std::move(name)) {
  base::Lock lock(state_.mutex);
  for (base::InterruptTimer timer;;) {
    if (const auto found = state_.made.find(name_); found != state_.made.end()) {
      made_ = found->second;
      return;
    }
    if (!std::exchange(state_.making, true)) break;
    state_.made_one.wait_for(lock, base::kAsksEvery,
                             [&]() TESSERA_REQUIRES(state_.mutex) { return !state_.making; });
    lock.unlock();
    state_.abort_flag->ask_interrupt(timer);
    lock.lock();
  }
  makes_ = true;
}

World::State::Making::~Making() {
  if (!makes_) return;
  {
    const base::Lock lock(state_.mutex);
    state_.making = false;
  }
  state_.made_one.notify_all();
}

std::shared_ptr<comm::Group> World::State::Making::keep(std::shared_ptr<comm::Group> group) const {
  const base::Lock lock(state_.mutex);
  return state_.made[name_] = std::move(group);
}

comm::Stream World::State::Making::stream_of(const std::vector<int>& ranks,
                                             const at::Device& where) const {
  const base::Lock lock(state_.mutex);
  auto& stream = state_.streams[ranks];
  if (!stream) stream = comm::Stream::make(where, comm::StreamUse::kOtherRanks);
  return stream;
}

namespace {

c10::Device device_of(const WorldOptions& options, int local_rank) {
  require_libtorch_of_build();  // before any other use of libtorch
  return comm::device_of_rank(options.device, local_rank);
}

}  // namespace

World::World(int rank, int size, int local_rank, const WorldOptions& options)
    : World(rank, size, local_rank, device_of(options, local_rank), options) {}

World::World(int rank, int size, int local_rank, c10::Device device, const WorldOptions& options)
    : rank_(rank),
      size_(size),
      local_rank_(local_rank),
      state_(std::make_unique<State>()),
      queue_(std::make_unique<comm::IssueQueue>(state_->abort_flag)) {
  base::heed_thread_limit();
  state_->device = device;
  if (state_->device.is_cpu()) return;
  state_->host_waits = std::make_shared<comm::HostWaits>(state_->abort_flag, state_->board,
                                                         options.timeout, state_->device);
  state_->board->watch_device(state_->host_waits);
}

World::~World() = default;

std::shared_ptr<World> World::connect(const WorldOptions& options) {
  return comm::connect_at(comm::read_place(options), options);
}

std::shared_ptr<World> World::from_store(const StorePtr& store, int rank, int size,
                                         const WorldOptions& options) {
  return comm::connect_over(store, rank, size, options);
}

std::shared_ptr<World> World::of_one(const WorldOptions& options) {
  auto world = std::make_shared<SoloWorld>(options);
  world->attach_thread();
  return world;
}

c10::Device World::device() const { return state_->device; }

void World::attach_thread() const {
  if (device().is_cpu()) return;
  comm::use_device(device());
  comm::HostWaits::attach(state_->host_waits);
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
  state_->abort_flag->require_not_over();
  const State::Making making(*state_, name);
  if (making.made()) return making.made();
  if (ranks.size() == 1) {
    return making.keep(std::make_shared<comm::SoloGroup>(name, state_->abort_flag));
  }
  const at::Device where = comm::carries_messages(purpose) ? at::Device(at::kCPU) : device();
  auto group = make_group(ranks, name, where);
  if (!where.is_cpu()) group->use_stream(making.stream_of(ranks, where), state_->host_waits);
  return making.keep(std::move(group));
}

comm::Group& World::control() { return *group(comm::all_ranks(size_), "control"); }

void World::begin_start_up() {
  if (!state_->store) return;
  state_->abort_flag->patience.raise(
      state_->init_timeout, [store = state_->store](int rank) { return work_of(*store, rank); });
  if (rank_ != 0) return;
  state_->start_up_log = std::make_unique<comm::StartUpLog>(
      state_->board, kStartUpLine,
      [store = state_->store, size = size_] { return works_of(*store, size); },
      [](const std::string& line) { log::info(line); });
}

void World::end_start_up() {
  if (!state_->store) return;
  work_at("");
  comm::barrier(control(), "end of the start-up");
  state_->start_up_log.reset();
  state_->abort_flag->patience.lower();
}

void World::work_at(const std::string& what) {
  if (!state_->abort_flag->patience.raised()) return;
  state_->store->set(work_key(rank_), what);
  if (!what.empty()) log::write_to_file(log::Level::kInfo, concat("start-up: ", what));
}

bool World::closed() const { return closed_; }

bool World::aborted() const { return state_->abort_flag->is_aborted(); }

void World::stop_queue() { queue_->stop(); }

bool launched() { return comm::read_place({}).launched(); }

namespace {

/// Runs `body` as the rank that this process is.
void run_as_rank(const comm::RunPlace& place, const std::function<void(World&)>& body,
                 const WorldOptions& options) {
  std::shared_ptr<World> world;
  const auto leave = [&](const std::exception& error) {
    const int code = comm::default_exit_code(error);
    if (!world) comm::report_failure(place, error, code);
    comm::report_failure(*world, error, code);
  };
  try {
    world = comm::connect_at(place, options);
    body(*world);
  } catch (const std::exception& error) {
    leave(error);
  } catch (...) {
    leave(Error(ErrorKind::kInternal, "the body threw something that is no std::exception"));
  }
  world.reset();  // waits for the others
}

}  // namespace

int launch(int nproc, const std::function<void(World&)>& body, const WorldOptions& options) {
  try {
    comm::RunPlace place = comm::read_place(options);
    if (!place.launched()) place.ranks = nproc;
    TESSERA_CHECK(nproc == place.ranks, ErrorKind::kUsage, "launch: found nproc ", nproc,
                  ", expected the ", place.ranks, " ranks that ", to_string(place.launch.launcher),
                  " started");
    if (const auto code = comm::start_ranks(place, options)) return *code;
    run_as_rank(place, body, options);
    return 0;
  } catch (const std::exception& error) {
    const int code = comm::default_exit_code(error);
    std::cout.flush();  // what was printed before stays before it
    comm::refuse_once(error, code, [&] { std::cerr << one_line(error.what()) << std::endl; });
    return code;
  }
}

}  // namespace tessera
