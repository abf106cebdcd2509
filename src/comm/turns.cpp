#include "comm/turns.h"

#include <ATen/ThreadLocalState.h>
#include <ATen/autocast_mode.h>
#include <ATen/record_function.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <cstddef>
#include <cstdlib>
#include <optional>
#include <utility>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif

#include "base/pass_local.h"
#include "base/threads/backward_pass.h"
#include "base/trace.h"
#include "comm/stream.h"
#include "tessera/error.h"

namespace tessera::comm {
namespace {

/// Holds the state that libtorch keeps for the thread and that belongs to the pass that runs on it.
class ThreadState {
 public:
  /// Reads the present state.
  explicit ThreadState(c10::Device device) : stream_(Stream::current(device)) {
    if (stream_) device_ = c10::impl::VirtualGuardImpl(device.type()).getDevice();
  }
  void set() const {
    at::ThreadLocalState::setThreadLocalState(torch_);
    at::autocast::set_autocast_cache_enabled(caches_casts_);
    c10::WarningUtils::set_warning_handler(warnings_);
    if (!stream_) return;
    const c10::impl::VirtualGuardImpl guard(device_.type());
    guard.setDevice(device_);
    guard.exchangeStream(stream_.get());
  }

 private:
  at::ThreadLocalState torch_;
  bool caches_casts_ = at::autocast::is_autocast_cache_enabled();
  c10::WarningHandler* warnings_ = c10::WarningUtils::get_warning_handler();
  Stream stream_;  // empty on the CPU
  c10::Device device_ = c10::kCPU;
};

/// A call stack, with a page below it that may not be accessed.
class Stack {
 public:
  Stack() : guard_(static_cast<std::size_t>(::sysconf(_SC_PAGESIZE))) {
    mapped_ = ::mmap(nullptr, guard_ + kBytes, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
    TESSERA_CHECK(mapped_ != MAP_FAILED, ErrorKind::kIo, "turns: found no address space for ",
                  kBytes, " bytes of a call stack; raise the limit of virtual memory (ulimit -v)");
    ::mprotect(mapped_, guard_, PROT_NONE);
    ::madvise(mapped_, guard_ + kBytes, MADV_NOHUGEPAGE);  // pages count when they are accessed
  }
  ~Stack() { ::munmap(mapped_, guard_ + kBytes); }
  Stack(const Stack&) = delete;
  Stack& operator=(const Stack&) = delete;

  void* bottom() const { return static_cast<std::byte*>(mapped_) + guard_; }
  static constexpr std::size_t kBytes = std::size_t{8} << 20;

 private:
  std::size_t guard_;
  void* mapped_ = nullptr;
};

/// One of the two passes: the state that is kept while the other one runs.
struct Side {
  ucontext_t context{};
  std::int64_t passed = 0;
  std::int64_t pieces = 0;
  bool has_begun = false, has_ended = false;
  int graph_task = -1;         // in which it is suspended
  void* fake_stack = nullptr;  // the address sanitizer's, as are the next two
  const void* bottom = nullptr;
  std::size_t bytes = 0;
  void* fiber = nullptr;  // the thread sanitizer's
};

enum class Leaving : std::uint8_t { kForATurn, kForGood };

// A sanitizer follows the call stack of each thread, and must be told when a thread changes it:
// leaves() is called immediately before the switch, arrives() immediately after it.

void leaves([[maybe_unused]] Side& from, [[maybe_unused]] const Side& to,
            [[maybe_unused]] Leaving leaving) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(leaving == Leaving::kForGood ? nullptr : &from.fake_stack,
                                 to.bottom, to.bytes);
#endif
#if defined(__SANITIZE_THREAD__)
  __tsan_switch_to_fiber(to.fiber, 0);
#endif
}

void arrives([[maybe_unused]] const Side& here, [[maybe_unused]] Side& from) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(here.fake_stack, &from.bottom, &from.bytes);
#endif
}

/// Gives the thread sanitizer a record of the second stack while it lives.
class Fibers {
 public:
  Fibers([[maybe_unused]] Side& first, [[maybe_unused]] Side& second) {
#if defined(__SANITIZE_THREAD__)
    first.fiber = __tsan_get_current_fiber();
    second.fiber = made_ = __tsan_create_fiber(0);
#endif
  }
  ~Fibers() {
#if defined(__SANITIZE_THREAD__)
    __tsan_destroy_fiber(made_);
#endif
  }
  Fibers(const Fibers&) = delete;
  Fibers& operator=(const Fibers&) = delete;

#if defined(__SANITIZE_THREAD__)
 private:
  void* made_;
#endif
};

}  // namespace

class Turns::Stacks {
 public:
  explicit Stacks(c10::Device device) : device_(device) {}

  Counts run(const std::function<void()>& first, const std::function<void()>& second,
             const Options& options);
  void pass();

 private:
  /// The second stack's outermost function.
  static void begin_second();
  void prepare_second();
  /// Calls the function of one side. Keeps the first error of either side.
  void call(const std::function<void()>& body);
  /// Suspends the running side until the other one resumes it.
  void resume(Side& other);
  void require_may_pass(const Side& other) const;
  /// Adds the piece of the running side to a trace.
  void end_piece();

  const c10::Device device_;
  Stack stack_;
  Side first_, second_;
  Side* running_ = &first_;
  base::PassValues values_of_second_;
  // The current run:
  const std::function<void()>* second_body_ = nullptr;
  const ThreadState* state_at_begin_ = nullptr;
  const Options* options_ = nullptr;
  TraceClock::time_point piece_began_;
  std::exception_ptr error_;
  int uncaught_at_begin_ = 0;
  std::exception_ptr handled_at_begin_;
};

void Turns::Stacks::call(const std::function<void()>& body) {
  try {
    body();
  } catch (...) {
    if (!error_) error_ = std::current_exception();
  }
}

void Turns::Stacks::resume(Side& other) {
  RECORD_USER_SCOPE("tessera::turn");  // ends the first side's time in a profile
  end_piece();
  Side& mine = *running_;
  const ThreadState state(device_);
  mine.graph_task = base::graph_task_of_pass();
  if (options_->at_turn) options_->at_turn();
  running_ = &other;
  base::exchange_pass_values(running_ == &second_ ? &values_of_second_ : nullptr);
  leaves(mine, other, Leaving::kForATurn);
  ::swapcontext(&mine.context, &other.context);
  arrives(mine, other);
  base::set_foreign_graph_task(other.graph_task);
  state.set();
}

void Turns::Stacks::begin_second() {
  Stacks& stacks = *now_;
  arrives(stacks.second_, stacks.first_);
  stacks.second_.has_begun = true;
  base::set_foreign_graph_task(stacks.first_.graph_task);
  stacks.call([&stacks] {
    stacks.state_at_begin_->set();
    (*stacks.second_body_)();
    stacks.end_piece();
  });
  stacks.second_.graph_task = -1;
  stacks.second_.has_ended = true;
  if (stacks.options_->at_turn) stacks.options_->at_turn();
  stacks.running_ = &stacks.first_;
  base::exchange_pass_values(nullptr);
  leaves(stacks.second_, stacks.first_, Leaving::kForGood);
  ::setcontext(&stacks.first_.context);
  std::abort();  // it does not return
}

void Turns::Stacks::prepare_second() {
#if defined(__SANITIZE_ADDRESS__)
  // An earlier run may have left marks of its outermost frame.
  __asan_unpoison_memory_region(stack_.bottom(), Stack::kBytes);
#endif
  values_of_second_ = base::pass_values();
  second_.bottom = stack_.bottom();
  second_.bytes = Stack::kBytes;
  ::getcontext(&second_.context);
  second_.context.uc_stack.ss_sp = stack_.bottom();
  second_.context.uc_stack.ss_size = Stack::kBytes;
  second_.context.uc_link = nullptr;
  ::makecontext(&second_.context, &Stacks::begin_second, 0);
}

void Turns::Stacks::end_piece() {
  Trace* const trace = current_trace();
  if (trace == nullptr) return;
  const auto& name = running_ == &first_ ? options_->first : options_->second;
  const auto now = trace->now();
  trace->add({TraceRow::kTurns,
              concat(name, " #", ++running_->pieces),
              std::exchange(piece_began_, now),
              now,
              {}});
}

Turns::Counts Turns::Stacks::run(const std::function<void()>& first,
                                 const std::function<void()>& second, const Options& options) {
  TESSERA_INVARIANT(now_ == nullptr, "turns: found a run inside of a run");
  TESSERA_INVARIANT(!base::in_backward_pass(), "turns: found a run inside of a backward");
  const ThreadState state(device_);
  first_ = {};
  second_ = {};
  const Fibers fibers(first_, second_);
  prepare_second();
  second_body_ = &second;
  state_at_begin_ = &state;
  uncaught_at_begin_ = std::uncaught_exceptions();
  handled_at_begin_ = std::current_exception();
  options_ = &options;
  piece_began_ = TraceClock::now();
  const struct Ends {
    ~Ends() { now_ = nullptr; }
  } however_it_ends;
  now_ = this;
  call([&] {
    first();
    if (second_.has_ended) end_piece();
  });
  first_.has_ended = true;
  if (!second_.has_ended && (second_.has_begun || !error_)) resume(second_);
  handled_at_begin_ = nullptr;
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
  return {first_.passed, second_.passed};
}

void Turns::Stacks::require_may_pass(const Side& other) const {
  TESSERA_INVARIANT(std::uncaught_exceptions() == uncaught_at_begin_ &&
                        std::current_exception() == handled_at_begin_,
                    "turns: found a turn while an error is handled or unwinds a stack");
  TESSERA_INVARIANT(base::NoTurns::why() == nullptr, "turns: found a turn inside of ",
                    base::NoTurns::why());
  TESSERA_CHECK(other.graph_task == -1 || !base::in_backward_pass(), ErrorKind::kUsage,
                "turns: found a backward in both of two passes that run side by side, expected it "
                "in one, since they share autograd's queue of this thread; call no "
                "torch::autograd::grad inside of a forward");
}

void Turns::Stacks::pass() {
  Side& mine = *running_;
  Side& other = running_ == &first_ ? second_ : first_;
  ++mine.passed;
  if (!error_) {
    require_may_pass(other);
    if (!other.has_ended) resume(other);
  }
  // A destructor that runs because of Ended is not interrupted.
  if (error_ && std::uncaught_exceptions() == uncaught_at_begin_) throw Ended();
}

const char* Turns::Ended::what() const noexcept {
  return "ended, since the pass that ran side by side with it failed";
}

Turns::Turns(c10::Device device) : stacks_(std::make_unique<Stacks>(device)) {}
Turns::~Turns() = default;

Turns::Counts Turns::run(const std::function<void()>& first, const std::function<void()>& second,
                         const Options& options) {
  return stacks_->run(first, second, options);
}

void Turns::pass_now() { now_->pass(); }

}  // namespace tessera::comm
