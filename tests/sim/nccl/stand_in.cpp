#include "sim/nccl/stand_in.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <array>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <numeric>
#include <set>
#include <stdexcept>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#include <utility>

#include "sim/fallback.h"
#include "sim/guard.h"
#include "sim/simulator.h"

namespace tessera::sim {
namespace {

constexpr std::chrono::seconds kPatience{60};

enum class Kind : std::uint8_t { kAllGather, kReduceScatter, kAllReduce, kAllToAll, kBroadcast };

/// One operation of one rank.
struct Piece {
  Kind kind = Kind::kAllGather;
  std::string text;  ///< on all ranks the same
  int root = 0;
  std::vector<std::int64_t> counts{};  ///< all-to-all: of elements for each rank
  std::vector<std::int64_t> receives{};
  at::Tensor source{};  ///< as it was when it was launched, on the host
  at::Tensor target{};  ///< the device's memory, to be written once all have come
};

struct Posted {
  std::vector<Piece> pieces;
  Access access;
};

std::string text_of(const Posted& posted) {
  std::string text;
  for (const Piece& piece : posted.pieces) text += (text.empty() ? "" : " + ") + piece.text;
  return text;
}

/// Between which ranks: what all of them share.
struct Communicator {
  const std::string name;
  const int size;
  int connected = 0;
  std::vector<std::uint64_t> next{};  ///< of each rank: the number of its next operation
  std::map<std::uint64_t, std::map<int, Posted>> under_way{};
};

struct Message {
  at::Tensor values;  ///< a send's as they were; a receive's memory
  Access access;
};
/// Two ranks that exchange messages.
struct Pair {
  const std::string name;
  int connected = 0;
  std::array<std::deque<Message>, 2> sends{}, receives{};  ///< from the lower rank up, and down
};

/// Names an operation: the communicator, and k for its k-th operation.
using Operation = std::pair<std::string, std::uint64_t>;

struct State {
  std::mutex mutex;
  std::condition_variable came;
  std::map<std::string, std::shared_ptr<Communicator>> communicators;
  std::map<std::string, std::shared_ptr<Pair>> pairs;
  std::map<int, std::vector<Operation>> order;  ///< by device: as they were launched
  std::vector<std::string> findings;
  int ids = 0;
  int first_addend = 0;
};
State& state() {
  static auto* const state = new State;
  return *state;
}

/// All that stands still throws this, too.
[[noreturn]] void fail(const std::string& why) {
  const std::string text = "nccl: " + why;
  break_open(text);
  state().came.notify_all();
  throw std::runtime_error(text);
}

/// The host stands still. Errors: where another rank has failed meanwhile, or none comes.
template <class Ready>
void wait_for_others(std::unique_lock<std::mutex>& lock, const std::string& what, Ready ready) {
  const bool in_time =
      state().came.wait_for(lock, kPatience, [&] { return ready() || !why_broken().empty(); });
  if (ready()) return;
  if (in_time) throw std::runtime_error(why_broken());
  fail(what + ": waited " + std::to_string(kPatience.count()) +
       " s for the other ranks to connect");
}

/// Returns the object that is shared under a name.
template <class Shared, class... Facts>
std::shared_ptr<Shared> shared(std::map<std::string, std::shared_ptr<Shared>>& all,
                               const std::string& name, Facts... facts) {
  std::shared_ptr<Shared>& found = all[name];
  if (!found) found = std::make_shared<Shared>(Shared{name, facts...});
  return found;
}

/// Operations of the host only: they belong to no rank.
class OnTheHost {
  const at::AutoDispatchBelowADInplaceOrView below_;
};

at::Tensor bytes_of(const at::Tensor& tensor) { return as_cpu(tensor.detach()).view(-1); }

at::Tensor copied(const at::Tensor& tensor) {
  const OnTheHost plainly;
  return bytes_of(tensor).clone();
}

at::Tensor in_place(const at::Tensor& tensor) {
  const OnTheHost plainly;
  return bytes_of(tensor);
}

at::Tensor part(const at::Tensor& values, const std::vector<std::int64_t>& counts, int index) {
  const auto begin = std::accumulate(counts.begin(), counts.begin() + index, std::int64_t{0});
  return values.narrow(0, begin, counts[static_cast<std::size_t>(index)]);
}

/// In the dtype that travels, rounded each time.
at::Tensor sum_of(const std::map<int, Posted>& all, std::size_t index, std::int64_t begin,
                  std::int64_t length) {
  const int ranks = static_cast<int>(all.size());
  at::Tensor sum;
  for (int i = 0; i < ranks; ++i) {
    const int rank = (i + state().first_addend) % ranks;
    const at::Tensor addend = all.at(rank).pieces[index].source.narrow(0, begin, length);
    sum = sum.defined() ? sum + addend : addend;
  }
  return sum;
}

/// One piece of all ranks, all of which have come.
void carry_out(const std::map<int, Posted>& all, std::size_t index) {
  for (const auto& [rank, posted] : all) {
    const Piece& mine = posted.pieces[index];
    const at::Tensor& target = mine.target;
    for (const auto& [other, others] : all) {
      const Piece& theirs = others.pieces[index];
      const at::Tensor& source = theirs.source;
      if (mine.kind == Kind::kAllGather) {
        target.narrow(0, other * source.numel(), source.numel()).copy_(source);
      } else if (mine.kind == Kind::kBroadcast && other == mine.root && rank != other) {
        target.copy_(source);
      } else if (mine.kind == Kind::kAllToAll) {
        const at::Tensor sent = part(source, theirs.counts, rank);
        const at::Tensor received = part(target, mine.receives, other);
        if (sent.numel() != received.numel()) {
          fail(mine.text + ": rank " + std::to_string(other) + " sends " +
               std::to_string(sent.numel()) + " elements, rank " + std::to_string(rank) +
               " receives " + std::to_string(received.numel()));
        }
        received.copy_(sent);
      }
    }
    if (mine.kind == Kind::kAllReduce) target.copy_(sum_of(all, index, 0, target.numel()));
    if (mine.kind == Kind::kReduceScatter) {
      target.copy_(sum_of(all, index, rank * target.numel(), target.numel()));
    }
  }
}

/// Posts an operation; the last rank to come carries it out. Threads: the holder of the mutex.
void post(Communicator& among, int rank, int device, Posted posted) {
  const std::uint64_t number = among.next[static_cast<std::size_t>(rank)]++;
  state().order[device].emplace_back(among.name, number);
  auto& all = among.under_way[number];
  for (const auto& [other, theirs] : all) {
    if (text_of(theirs) == text_of(posted)) continue;
    fail("operation " + std::to_string(number) + " of " + among.name + ": rank " +
         std::to_string(other) + " launches " + text_of(theirs) + ", rank " + std::to_string(rank) +
         " " + text_of(posted));
  }
  all.emplace(rank, std::move(posted));
  if (static_cast<int>(all.size()) < among.size) return;
  {
    const OnTheHost plainly;
    for (std::size_t i = 0; i < all.begin()->second.pieces.size(); ++i) carry_out(all, i);
  }
  for (const auto& [other, theirs] : all) end_open(theirs.access);
  among.under_way.erase(number);
}

/// Finds collectives that would not all end if a device took its own one after the other. Threads:
/// as post().
void find_standstill() {
  auto& order = state().order;
  std::map<Operation, std::size_t> involved;  // devices
  std::map<int, std::size_t> done;
  std::vector<int> moved;
  for (const auto& [device, all] : order) {
    for (const Operation& one : all) ++involved[one];
    moved.push_back(device);
  }
  std::map<Operation, std::vector<int>> there;
  while (!moved.empty()) {
    const int device = moved.back();
    moved.pop_back();
    if (done[device] == order[device].size()) continue;
    const Operation& next = order[device][done[device]];
    std::vector<int>& came = there[next];
    came.push_back(device);
    if (came.size() < involved[next]) continue;
    for (const int each : came) ++done[each];
    moved.insert(moved.end(), came.begin(), came.end());
  }
  for (const auto& [device, all] : order) {
    if (done[device] == all.size()) continue;
    const auto& [name, number] = all[done[device]];
    state().findings.push_back(
        "nccl: ranks launch collectives of several communicators in different orders: sim:" +
        std::to_string(device) + " stands still at operation " + std::to_string(number) + " of " +
        name);
  }
  order.clear();
}

class PairWork final : public c10d::Work {
 public:
  PairWork(Mark end, c10::DeviceIndex device) : end_(std::move(end)), device_(device) {}
  bool wait(std::chrono::milliseconds /*timeout*/) override {
    block(current_stream(device_), end_);
    return true;
  }

 private:
  const Mark end_;
  const c10::DeviceIndex device_;
};

}  // namespace

void sum_from(int rank) {
  const std::lock_guard lock(state().mutex);
  state().first_addend = rank;
}

std::vector<std::string> take_nccl_findings() {
  const std::lock_guard lock(state().mutex);
  const auto left = [](const std::string& what) { state().findings.push_back("nccl: " + what); };
  for (const auto& [name, among] : state().communicators) {
    for (const auto& [number, all] : std::exchange(among->under_way, {})) {
      left("operation " + std::to_string(number) + " of " + name + ", " +
           text_of(all.begin()->second) + ", was launched by " + std::to_string(all.size()) +
           " of " + std::to_string(among->size) + " ranks");
      for (const auto& [rank, posted] : all) end_open(posted.access);
    }
  }
  for (const auto& [name, pair] : state().pairs) {
    const auto drop = [&, &of = name](std::deque<Message>& ends, const char* who) {
      if (!ends.empty()) left(std::string("no rank ") + who + " one of the " + of);
      for (const Message& each : std::exchange(ends, {})) end_open(each.access);
    };
    for (auto& sends : pair->sends) drop(sends, "receives");
    for (auto& receives : pair->receives) drop(receives, "sends");
  }
  const auto unused = [](const auto& each) { return each.second.use_count() == 1; };
  std::erase_if(state().communicators, unused);
  std::erase_if(state().pairs, unused);
  find_standstill();
  return std::exchange(state().findings, {});
}

}  // namespace tessera::sim

namespace c10d {

using namespace tessera::sim;  // its parts are this class's

class ProcessGroupNCCL::Here {
 public:
  Here(c10::intrusive_ptr<Store> store, int rank, int size)
      : store_(std::move(store)), rank_(rank), size_(size) {}

  void bind(at::Device device) { device_ = device; }

  void connect(at::Device device) {
    require(device_ == device, "it is bound to another device");
    const std::string id = agreed("communicator", rank_ == 0);
    std::unique_lock lock(state().mutex);
    among_ = shared(state().communicators, id, size_);
    among_->next.resize(static_cast<std::size_t>(size_));
    ++among_->connected;
    state().came.notify_all();
    wait_for_others(lock, id, [&] { return among_->connected >= size_; });
  }

  void start() {
    require(!together_, "startCoalescing twice");
    together_ = true;
  }
  c10::intrusive_ptr<Work> end() {
    require(together_, "endCoalescing without startCoalescing");
    together_ = false;
    launch_all();
    return nullptr;
  }

  c10::intrusive_ptr<Work> add(Piece piece, const at::Tensor& target, const at::Tensor& source,
                               bool async) {
    require(!is_shut_, "it was shut down");
    require(among_ != nullptr, "it is not connected: the first collective would block the host");
    require(!async, "asyncOp: it would run on a stream of c10d's");
    for (const at::Tensor& each : {target, source}) {
      require(each.device() == device_, "a tensor of another device");
      require(each.is_contiguous(), "a tensor that is not contiguous");
      require(each.scalar_type() == source.scalar_type(), "two dtypes");
      require(is_carried(each.scalar_type()), "a dtype that NCCL does not know");
    }
    piece.text += std::string(" of ") + c10::toString(source.scalar_type());
    pieces_.push_back({std::move(piece), target, source});
    if (!together_) launch_all();
    return nullptr;
  }

  c10::intrusive_ptr<Work> message(const at::Tensor& tensor, int peer, bool sends) {
    require(!is_shut_, "it was shut down");
    require(!together_, "a message among coalesced collectives");
    require(tensor.device() == device_ && tensor.is_contiguous(),
            "a tensor elsewhere, or with gaps");
    End& end = connected(peer);
    const c10::DeviceIndex index = tensor.device().index();
    const c10::Stream callers = current_stream(index);
    if (sends) stand_still_behind(callers);
    block(end.stream, record(callers));
    const std::size_t way = (rank_ < peer) == sends ? 0 : 1;
    Message posted{sends ? copied(tensor) : in_place(tensor),
                   launch(end.stream, sends ? "nccl send" : "nccl recv", {{tensor, !sends}},
                          CarriedOut::kLater)};
    // The sent values were copied, so only a query of its end has to know that no rank received it.
    leave_open(posted.access, sends ? LaterLaunches::kRun : LaterLaunches::kWait);
    {
      const std::lock_guard lock(state().mutex);
      (sends ? end.pair->sends : end.pair->receives)[way].push_back(std::move(posted));
      meet(*end.pair, way);
    }
    return c10::make_intrusive<PairWork>(record(end.stream), index);
  }

  void shut() { is_shut_ = true; }
  int size() const { return size_; }

 private:
  struct Added {
    Piece piece;
    at::Tensor target, source;
  };
  struct End {
    std::shared_ptr<Pair> pair;
    c10::Stream stream;
  };

  static bool is_carried(at::ScalarType dtype) {
    static const std::set<at::ScalarType> kKnown{at::kBool,  at::kByte,   at::kChar,
                                                 at::kInt,   at::kLong,   at::kHalf,
                                                 at::kFloat, at::kDouble, at::kBFloat16};
    return kKnown.contains(dtype);
  }
  void require(bool holds, const std::string& what) const {
    if (!holds)
      fail("rank " + std::to_string(rank_) + " of " + std::to_string(size_) + ": " + what);
  }

  /// A name that one rank makes and the others learn by the store.
  std::string agreed(const std::string& what, bool makes) {
    if (makes) {
      std::unique_lock lock(state().mutex);
      const std::string id = what + " " + std::to_string(state().ids++);
      lock.unlock();
      store_->set(what, id);
      return id;
    }
    return store_->get_to_str(what);
  }

  End& connected(int peer) {
    const auto found = ends_.find(peer);
    if (found != ends_.end()) return found->second;
    const int low = std::min(rank_, peer), high = std::max(rank_, peer);
    const std::string id = agreed(
        "messages between " + std::to_string(low) + " and " + std::to_string(high), rank_ == low);
    std::unique_lock lock(state().mutex);
    auto pair = shared(state().pairs, id);
    ++pair->connected;
    state().came.notify_all();
    wait_for_others(lock, id, [&] { return pair->connected >= 2; });
    const c10::impl::VirtualGuardImpl guard(device_->type());
    return ends_.emplace(peer, End{std::move(pair), guard.getNewStream(*device_)}).first->second;
  }

  /// Messages of one way meet in the order of their launches.
  void meet(Pair& pair, std::size_t way) const {
    auto &sends = pair.sends[way], &receives = pair.receives[way];
    while (!sends.empty() && !receives.empty()) {
      const Message sent = std::move(sends.front()), received = std::move(receives.front());
      sends.pop_front();
      receives.pop_front();
      require(sent.values.sizes() == received.values.sizes() &&
                  sent.values.scalar_type() == received.values.scalar_type(),
              "a message of other size or dtype than its receive");
      {
        const OnTheHost plainly;
        received.values.copy_(sent.values);
      }
      end_open(sent.access);
      end_open(received.access);
    }
  }

  /// One launch: NCCL orders nothing inside a group.
  void launch_all() {
    std::vector<Added> all = std::exchange(pieces_, {});
    if (all.empty()) return;
    require_disjoint(all);
    std::vector<TensorAccess> accessed;
    std::string name = "nccl";
    for (const Added& each : all) {
      accessed.push_back({each.source, false});
      accessed.push_back({each.target, true});
      name += " " + each.piece.text;
    }
    Posted posted;
    posted.access = launch(current_stream(device_->index()), name, accessed);
    leave_open(posted.access, LaterLaunches::kWait);
    for (Added& each : all) {
      each.piece.source = copied(each.source);
      each.piece.target = in_place(each.target);
      posted.pieces.push_back(std::move(each.piece));
    }
    const std::lock_guard lock(state().mutex);
    post(*among_, rank_, device_->index(), std::move(posted));
  }

  /// Requires that memory which one operation of a group writes is not accessed by another one.
  void require_disjoint(const std::vector<Added>& all) const {
    const auto overlap = [](const at::Tensor& a, const at::Tensor& b) {
      const auto begin = [](const at::Tensor& one) {
        return reinterpret_cast<std::uintptr_t>(one.const_data_ptr());
      };
      return a.numel() > 0 && b.numel() > 0 && begin(a) < begin(b) + b.nbytes() &&
             begin(b) < begin(a) + a.nbytes();
    };
    for (const Added& one : all) {
      for (const Added& other : all) {
        if (&one == &other) continue;
        require(
            !overlap(one.target, other.target) && !overlap(one.target, other.source),
            one.piece.text + " writes what " + other.piece.text + " of the same group accesses");
      }
    }
  }

  const c10::intrusive_ptr<Store> store_;
  const int rank_;
  const int size_;
  std::optional<at::Device> device_;
  std::shared_ptr<Communicator> among_;
  std::map<int, End> ends_;
  std::vector<Added> pieces_;
  bool together_ = false;
  bool is_shut_ = false;
};

ProcessGroupNCCL::ProcessGroupNCCL(c10::intrusive_ptr<Store> store, int rank, int size,
                                   const c10::intrusive_ptr<Options>& /*options*/)
    : here_(std::make_unique<Here>(std::move(store), rank, size)) {}
ProcessGroupNCCL::~ProcessGroupNCCL() = default;

void ProcessGroupNCCL::setBoundDeviceId(std::optional<at::Device> device) {
  here_->bind(device.value());
}
void ProcessGroupNCCL::eagerConnectSingleDevice(at::Device device) { here_->connect(device); }
void ProcessGroupNCCL::shutdown() { here_->shut(); }
ErrorType ProcessGroupNCCL::getError() { return ErrorType::SUCCESS; }
void ProcessGroupNCCL::startCoalescing() { here_->start(); }
c10::intrusive_ptr<Work> ProcessGroupNCCL::endCoalescing() { return here_->end(); }

namespace {

std::string sized(const char* what, std::int64_t elements) {
  return std::string(what) + " of " + std::to_string(elements);
}

void require_sum(const ReduceOp& op) {
  TORCH_CHECK(op == ReduceOp::SUM, "nccl: found another reduction than a sum");
}

/// As c10d counts parts: rows of the first dimension; none means equal ones.
std::vector<std::int64_t> counts_of(const at::Tensor& tensor, const std::vector<std::int64_t>& rows,
                                    int ranks) {
  const std::int64_t length = tensor.dim() == 0 ? 1 : tensor.size(0);
  if (rows.empty()) {
    TORCH_CHECK(length % ranks == 0, "nccl: found ", length, " rows, expected equal parts for ",
                ranks, " ranks");
    return std::vector<std::int64_t>(static_cast<std::size_t>(ranks), tensor.numel() / ranks);
  }
  TORCH_CHECK(static_cast<int>(rows.size()) == ranks &&
                  std::accumulate(rows.begin(), rows.end(), std::int64_t{0}) == length,
              "nccl: found splits ", rows, " of ", length, " rows for ", ranks, " ranks");
  const std::int64_t row = length == 0 ? 0 : tensor.numel() / length;
  std::vector<std::int64_t> counts;
  for (const std::int64_t each : rows) counts.push_back(each * row);
  return counts;
}

}  // namespace

c10::intrusive_ptr<Work> ProcessGroupNCCL::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                           const AllgatherOptions& options) {
  TORCH_CHECK(output.numel() == input.numel() * here_->size(), "nccl: all-gather of ",
              input.numel(), " elements into ", output.numel());
  return here_->add({Kind::kAllGather, sized("all-gather", input.numel())}, output, input,
                    options.asyncOp);
}

c10::intrusive_ptr<Work> ProcessGroupNCCL::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input, const ReduceScatterOptions& options) {
  require_sum(options.reduceOp);
  TORCH_CHECK(input.numel() == output.numel() * here_->size(), "nccl: reduce-scatter of ",
              input.numel(), " elements into ", output.numel());
  return here_->add({Kind::kReduceScatter, sized("reduce-scatter", output.numel())}, output, input,
                    options.asyncOp);
}

c10::intrusive_ptr<Work> ProcessGroupNCCL::allreduce(std::vector<at::Tensor>& tensors,
                                                     const AllreduceOptions& options) {
  require_sum(options.reduceOp);
  TORCH_CHECK(tensors.size() == 1, "nccl: found ", tensors.size(), " tensors, expected one");
  const at::Tensor& data = tensors.front();
  return here_->add({Kind::kAllReduce, sized("all-reduce", data.numel())}, data, data,
                    options.asyncOp);
}

c10::intrusive_ptr<Work> ProcessGroupNCCL::broadcast(std::vector<at::Tensor>& tensors,
                                                     const BroadcastOptions& options) {
  TORCH_CHECK(tensors.size() == 1, "nccl: found ", tensors.size(), " tensors, expected one");
  const at::Tensor& data = tensors.front();
  const std::string from = " from rank " + std::to_string(options.rootRank);
  return here_->add({Kind::kBroadcast, sized("broadcast", data.numel()) + from,
                     static_cast<int>(options.rootRank)},
                    data, data, options.asyncOp);
}

c10::intrusive_ptr<Work> ProcessGroupNCCL::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                         std::vector<std::int64_t>& receives,
                                                         std::vector<std::int64_t>& sends,
                                                         const AllToAllOptions& options) {
  return here_->add(
      {Kind::kAllToAll, "all-to-all", /*root=*/0, counts_of(input, sends, here_->size()),
       counts_of(output, receives, here_->size())},
      output, input, options.asyncOp);
}

c10::intrusive_ptr<Work> ProcessGroupNCCL::send(std::vector<at::Tensor>& tensors, int peer,
                                                int /*tag*/) {
  return here_->message(tensors.at(0), peer, /*sends=*/true);
}

c10::intrusive_ptr<Work> ProcessGroupNCCL::recv(std::vector<at::Tensor>& tensors, int peer,
                                                int /*tag*/) {
  return here_->message(tensors.at(0), peer, /*sends=*/false);
}

}  // namespace c10d
