// What every part of the simulator goes through: clocks, accesses and copies under one mutex.
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

struct Accessed {
  at::Tensor tensor;
  bool written = false;
};

/// When an operation is carried out: by its launch, which stands still behind what is open
/// (leave_open), or by who ends it.
enum class CarriedOut { kAtOnce, kLater };
/// One operation on a stream: counted, behind what its thread has waited for, and compared with
/// every access before. Throws Race.
Access launch(const c10::Stream& stream, const std::string& operation,
              const std::vector<Accessed>& accessed, CarriedOut when = CarriedOut::kAtOnce);
/// As the launch of something on the stream that runs at once.
void stand_still_behind(const c10::Stream& stream);
/// A result that the operation made afterwards.
void access_result(const Access& of, const at::Tensor& result);

/// Non-blocking copies (late_copies.h).
void arrive_late(const Access& copy, const at::Tensor& target, const at::Tensor& value);
void check_late(const Access& copy, const at::Tensor& source);

/// What others end: it is not over before. What is launched behind it stands still until then, on the
/// host, too, since kernels run at once; or goes on, where nothing that it reads is missing.
enum class Behind { kStandsStill, kResumes };
void leave_open(const Access& operation, Behind behind);
void end_open(const Access& operation);
/// Nobody will end what is open: whoever stands still throws std::runtime_error, until restart().
void break_open(const std::string& why);
std::string why_broken();

/// What an event carries.
struct Mark {
  Clock clock;
  std::chrono::steady_clock::time_point time;
};
Mark record(const c10::Stream& stream);
void block(const c10::Stream& stream, const Mark& mark);
/// Whether it is over, without standing still; what is answered is known from then on.
bool ask(const Mark& mark);
bool ask(const c10::Stream& stream);
/// The host stands still until it is over. Counted under `name`.
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

/// This thread frees these bytes: what it has waited for is over there for whoever takes them next.
void free_bytes(const void* begin, std::size_t size);

/// What was launched is over for everybody, and counts begin at nothing.
void restart();

/// For the report of a fault: the name of the operation that wrote the byte last, null where nobody
/// did or the simulator is busy. Takes no memory.
const char* last_writer(const void* address) noexcept;

}  // namespace tessera::sim
