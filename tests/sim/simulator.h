// The common core of all parts of the simulator: clocks, accesses and copies under one mutex.
// Kernels themselves run outside of it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <chrono>
#include <cstddef>
#include <string>
#include <vector>

#include "sim/clocks.h"

namespace tessera::sim {

/// A tensor that an operation reads or writes.
struct TensorAccess {
  at::Tensor tensor;
  bool written = false;
};

/// When an operation is carried out: by its launch, which waits for what is open (leave_open), or
/// by the thread that ends it.
enum class CarriedOut { kAtOnce, kLater };
/// Launches one operation on a stream: counts it, orders it after what its thread has waited for,
/// and compares it with every earlier access. Throws Race.
Access launch(const c10::Stream& stream, const std::string& operation,
              const std::vector<TensorAccess>& accessed, CarriedOut when = CarriedOut::kAtOnce);
/// Waits as a launch on the stream would that runs at once.
void stand_still_behind(const c10::Stream& stream);
/// Notes a result that the operation made afterwards.
void note_result(const Access& of, const at::Tensor& result);

/// Non-blocking copies (late_copies.h).
void arrive_late(const Access& copy, const at::Tensor& target, const at::Tensor& value);
void check_late(const Access& copy, const at::Tensor& source);

/// Leaves an operation open, which others end. What is launched after it waits until then, on the
/// host, too, since kernels run at once; or runs, where nothing that it reads is missing.
enum class LaterLaunches { kWait, kRun };
void leave_open(const Access& operation, LaterLaunches later);
void end_open(const Access& operation);
/// Declares that open operations will not be ended: waiting threads throw std::runtime_error, until
/// restart().
void break_open(const std::string& why);
std::string why_broken();

/// The content of an event.
struct Mark {
  Clock clock;
  std::chrono::steady_clock::time_point time;
};
Mark record(const c10::Stream& stream);
void block(const c10::Stream& stream, const Mark& mark);
/// Whether it is over, without waiting; a positive answer is known from then on.
bool ask(const Mark& mark);
bool ask(const c10::Stream& stream);
/// Waits on the host until it is over. Counted under `name`.
void wait_on_host(const Mark& mark, const std::string& name);
void wait_on_host(const c10::Stream& stream, const std::string& name);
void wait_on_host(c10::DeviceIndex device, const std::string& name);

/// The launches of a stream up to now, for the allocator.
struct Until {
  Slot stream = -1;
  std::uint64_t launch = 0;
  std::uint64_t epoch = current_epoch();
};
Until until_now(const c10::Stream& stream);
/// Whether this thread has waited for them.
bool waited_for(const Until& until);

/// This thread frees these bytes: for the next owner, what the thread has waited for is over there.
void free_bytes(const void* begin, std::size_t size);

/// Everything launched has ended for all, and counts begin at 0.
void restart();

/// For the report of a fault: the name of the operation that wrote the byte last, null where there
/// is none or the simulator is busy. Takes no memory.
const char* last_writer(const void* address) noexcept;

}  // namespace tessera::sim
