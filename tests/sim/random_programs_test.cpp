// Random programs of launches, events and host waits on one to three streams and two host threads,
// with memory that is freed and taken again: the simulator reports a race at the very operation at
// which a reference finds the first unordered pair.
//
// The reference finds the same answer in another way: it orders whole operations by a graph (a
// stream's own order, record to block, record or stream to a host's wait, a wait to what its thread
// does later, what a thread has waited for to the next owner of what it frees), takes the
// transitive closure, and compares sets of elements.
#include <ATen/ATen.h>

#include <bitset>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <optional>
#include <random>
#include <sstream>
#include <thread>

#include "sim/streams.h"
#include "support/test.h"

namespace tessera::sim::random_programs_test {
namespace {

constexpr std::size_t kStreams = 3, kEvents = 3, kBuffers = 3, kThreads = 2;
constexpr std::size_t kSide = 32, kElements = kSide * kSide, kMostSteps = 28;

enum class Do {
  kFill,
  kSum,
  kCopy,
  kMultiply,
  kRecord,
  kBlock,
  kWaitEvent,
  kAskEvent,
  kWaitStream,
  kRenew
};

/// Rows or columns of a buffer.
struct Slice {
  std::size_t buffer = 0;
  bool rows = true;
  std::int64_t begin = 0, length = 0;
};

struct Step {
  Do what = Do::kFill;
  std::size_t thread = 0, stream = 0, event = 0;
  Slice to, from;
  bool recorded = false;  ///< kRenew: the old block on its stream
};
using Program = std::vector<Step>;

class Draw {
 public:
  explicit Draw(std::uint64_t seed) : random_(seed) {}
  std::size_t below(std::size_t count) { return static_cast<std::size_t>(random_() % count); }
  bool once_in(std::size_t count) { return below(count) == 0; }

  Program program() {
    const std::size_t streams = 1 + below(kStreams), threads = once_in(3) ? kThreads : 1;
    // Few events race nearly always, many nearly never.
    const std::size_t orders = 1 + below(6);
    Program program;
    std::size_t on = 0;
    while (program.size() < kMostSteps) {
      program.push_back(step(streams, threads));
      Step& step = program.back();
      if (!once_in(3)) step.stream = on;  // a while on each
      on = step.stream;
      for (std::size_t i = 0; i + 1 < orders && once_in(2); ++i) order(program, streams, threads);
    }
    return program;
  }

 private:
  Slice slice() {
    const auto begin = static_cast<std::int64_t>(below(kSide - 1));
    return {below(kBuffers), once_in(2), begin,
            1 + static_cast<std::int64_t>(below(kSide - static_cast<std::size_t>(begin)))};
  }

  Step step(std::size_t streams, std::size_t threads) {
    constexpr Do kLaunches[] = {Do::kFill, Do::kSum,      Do::kSum,
                                Do::kCopy, Do::kMultiply, Do::kRenew};
    Step step;
    step.what = kLaunches[below(std::size(kLaunches))];
    step.thread = below(threads);
    step.stream = below(streams);
    step.to = slice();
    step.from = slice();
    step.from.rows = step.to.rows;
    step.from.length = step.to.length;
    step.from.begin =
        static_cast<std::int64_t>(below(kSide - static_cast<std::size_t>(step.to.length) + 1));
    // An operation over a part of itself is refused by libtorch.
    if (step.from.buffer == step.to.buffer) step.from.buffer = (step.to.buffer + 1) % kBuffers;
    step.recorded = once_in(3);
    return step;
  }

  /// An event from one stream to another, or a part of that, or a host that waits.
  void order(Program& program, std::size_t streams, std::size_t threads) {
    Step step;
    step.thread = below(threads);
    step.event = below(kEvents);
    step.stream = program.back().stream;
    if (!once_in(6)) {
      step.what = Do::kRecord;
      program.push_back(step);
    }
    constexpr Do kWaits[] = {Do::kBlock,     Do::kBlock,      Do::kBlock,
                             Do::kWaitEvent, Do::kWaitStream, Do::kAskEvent};
    step.what = kWaits[below(std::size(kWaits))];
    if (step.what == Do::kBlock) step.stream = below(streams);
    if (once_in(2)) step.thread = below(threads);
    program.push_back(step);
  }

  std::mt19937_64 random_;
};

std::string text(const Program& program, std::size_t stop) {
  constexpr const char* kNames[] = {"fill",  "sum",        "copy",      "multiply",    "record",
                                    "block", "wait event", "ask event", "wait stream", "renew"};
  std::ostringstream out;
  const auto shown = [&](const Slice& slice) {
    out << " buffer " << slice.buffer << (slice.rows ? " rows " : " columns ") << slice.begin << "+"
        << slice.length;
  };
  for (std::size_t i = 0; i <= stop && i < program.size(); ++i) {
    const Step& step = program[i];
    out << "  " << i << ": thread " << step.thread << " stream " << step.stream << " "
        << kNames[static_cast<std::size_t>(step.what)] << " (event " << step.event << ")";
    shown(step.to);
    shown(step.from);
    out << (step.recorded ? " recorded\n" : "\n");
  }
  return out.str();
}

/// Does what it is given on a thread of its own, while the caller stands still.
class Worker {
 public:
  Worker() : thread_([this] { serve(); }) {}
  ~Worker() {
    run(nullptr);
    thread_.join();
  }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  void run(std::function<void()> task) {
    std::unique_lock lock(mutex_);
    task_ = std::move(task);
    asked_ = true;
    changed_.notify_all();
    changed_.wait(lock, [&] { return !asked_; });
    if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
  }

 private:
  void serve() {
    std::unique_lock lock(mutex_);
    for (bool on = true; on;) {
      changed_.wait(lock, [&] { return asked_; });
      on = task_ != nullptr;
      try {
        if (on) task_();
      } catch (...) {
        failure_ = std::current_exception();
      }
      asked_ = false;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::function<void()> task_;
  std::exception_ptr failure_;
  bool asked_ = false;
  std::thread thread_;
};

/// A use of memory: a block, and which of its elements.
struct Use {
  const void* block = nullptr;
  std::bitset<kElements> elements;
  bool writes = false;
};

/// The whole operations, in the order of the graph.
class Reference {
 public:
  /// The step, and what it uses, or frees. Whether it races with one before it.
  bool add(const Step& step, std::vector<Use> uses) {
    const std::size_t here = nodes_.size();
    Node node{{}, std::move(uses)};
    const auto behind = [&](std::optional<std::size_t> other) {
      if (!other) return;
      node.before |= nodes_[*other].before;
      node.before.set(*other);
    };
    // To wait for an event that was never recorded puts nothing on a stream.
    if (step.what == Do::kBlock && !recorded_[step.event]) return false;
    const bool on_stream =
        step.what != Do::kWaitEvent && step.what != Do::kAskEvent && step.what != Do::kWaitStream;
    // A wait knows what its thread knew, and a launch what its thread has waited for.
    behind(last_wait_[step.thread]);
    if (step.what == Do::kRenew) {
      // The next owner gets the memory after what this thread has waited for.
      for (std::size_t i = 0; i < here; ++i) {
        if (!node.before.test(i)) continue;
        std::erase_if(nodes_[i].uses,
                      [&](const Use& use) { return use.block == node.uses.front().block; });
      }
      return false;
    }
    if (on_stream) behind(last_on_[step.stream]);
    if (step.what == Do::kBlock || step.what == Do::kWaitEvent || step.what == Do::kAskEvent) {
      behind(recorded_[step.event]);
    }
    if (step.what == Do::kWaitStream) behind(last_on_[step.stream]);
    bool races = false;
    for (std::size_t i = 0; i < here; ++i) {
      if (!node.before.test(i) && conflict(nodes_[i].uses, node.uses)) races = true;
    }
    nodes_.push_back(std::move(node));
    if (step.what == Do::kRecord) recorded_[step.event] = here;
    (on_stream ? last_on_[step.stream] : last_wait_[step.thread]) = here;
    return races;
  }

 private:
  struct Node {
    std::bitset<8 * kMostSteps> before;
    std::vector<Use> uses;
  };
  static bool conflict(const std::vector<Use>& first, const std::vector<Use>& second) {
    for (const Use& a : first) {
      for (const Use& b : second) {
        if (a.block == b.block && (a.writes || b.writes) && (a.elements & b.elements).any()) {
          return true;
        }
      }
    }
    return false;
  }

  std::vector<Node> nodes_;
  std::optional<std::size_t> last_on_[kStreams], recorded_[kEvents], last_wait_[kThreads];
};

/// Runs a program up to its first race.
class Execution {
 public:
  Execution(const std::vector<c10::Stream>& streams, Worker& other)
      : streams_(streams), other_(other) {
    for (std::size_t i = 0; i < kBuffers; ++i) buffers_.push_back(fresh());
    for (std::size_t i = 0; i < kStreams; ++i) {
      sums_.push_back(at::empty({}, on(0)));
      events_.emplace_back(c10::DeviceType::PrivateUse1);
    }
  }

  /// The step at which the simulator, and the one at which the reference reports; none: the size.
  std::pair<std::size_t, std::size_t> operator()(const Program& program) {
    Reference reference;
    for (std::size_t i = 0; i < program.size(); ++i) {
      const Step& step = program[i];
      const bool expected = reference.add(step, uses_of(step));
      std::string race;
      const auto task = [&] {
        race = race_of([&] { run_on(streams_[step.stream], [&] { act(step); }); });
      };
      if (step.thread == 0) {
        task();
      } else {
        other_.run(task);
      }
      if (expected || !race.empty()) {
        return {race.empty() ? program.size() : i, expected ? i : program.size()};
      }
    }
    return {program.size(), program.size()};
  }

 private:
  static at::Tensor fresh() { return at::empty({kSide, kSide}, on(0)); }

  at::Tensor view(const Slice& slice) const {
    return buffers_[slice.buffer].narrow(slice.rows ? 0 : 1, slice.begin, slice.length);
  }
  Use use(const Slice& slice, bool writes) const {
    Use use{buffers_[slice.buffer].const_data_ptr(), {}, writes};
    for (std::size_t i = 0; i < kElements; ++i) {
      const auto place = static_cast<std::int64_t>(slice.rows ? i / kSide : i % kSide);
      if (place >= slice.begin && place < slice.begin + slice.length) use.elements.set(i);
    }
    return use;
  }
  std::vector<Use> uses_of(const Step& step) const {
    switch (step.what) {
      case Do::kFill:
        return {use(step.to, true)};
      case Do::kSum:
        return {use(step.from, false)};
      case Do::kCopy:
      case Do::kMultiply:
        return {use(step.to, true), use(step.from, false)};
      case Do::kRenew:
        return {use(step.to, false)};
      default:
        return {};
    }
  }

  void act(const Step& step) {
    const c10::Stream& stream = streams_[step.stream];
    c10::Event& event = events_[step.event];
    switch (step.what) {
      case Do::kFill:
        view(step.to).fill_(1);
        break;
      case Do::kSum:
        at::sum_out(sums_[step.stream], view(step.from), at::IntArrayRef{0, 1});
        break;
      case Do::kCopy:
        view(step.to).copy_(view(step.from));
        break;
      case Do::kMultiply:
        view(step.to).mul_(view(step.from));
        break;
      case Do::kRecord:
        event.record(stream);
        break;
      case Do::kBlock:
        event.block(stream);
        break;
      case Do::kWaitEvent:
        event.synchronize();
        break;
      case Do::kAskEvent:
        EXPECT_TRUE(event.query());
        break;
      case Do::kWaitStream:
        guard().synchronizeStream(stream);
        break;
      case Do::kRenew: {
        at::Tensor& buffer = buffers_[step.to.buffer];
        if (step.recorded) buffer.record_stream(stream);
        buffer = at::Tensor();
        buffer = fresh();
        break;
      }
    }
  }

  const std::vector<c10::Stream>& streams_;
  Worker& other_;
  std::vector<at::Tensor> buffers_, sums_;
  std::vector<c10::Event> events_;
};

TEST(RandomPrograms, RaceWhereAReferenceSaysSoAndNowhereElse) {
  constexpr std::uint64_t kPrograms = 1500;
  std::size_t racing = 0;
  Worker other;
  const std::vector<c10::Stream> streams{current(0), new_stream(0), new_stream(0)};
  for (std::uint64_t seed = 0; seed < kPrograms; ++seed) {
    const Program program = Draw(seed).program();
    settle();
    const auto [found, expected] = Execution(streams, other)(program);
    ASSERT_EQ(found, expected) << "program " << seed << ":\n"
                               << text(program, std::min(found, expected));
    if (found < program.size()) ++racing;
  }
  EXPECT_GT(racing, kPrograms / 5) << "the programs that are drawn are too tame";
  EXPECT_LT(racing, kPrograms - kPrograms / 5) << "the programs that are drawn are too wild";
}

}  // namespace
}  // namespace tessera::sim::random_programs_test
