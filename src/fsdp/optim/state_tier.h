// StateTier: where optimizer state lies between updates, if not in the memory that trains.
//
// What a tier does is asked for in order and done in order, beside what the rank computes: a read
// begins while the update before it runs. The one tier that there is is a file of the rank's own
// (io/scratch_file.h), read and written by a thread of its own; pinned memory of the host, beside a
// device, would be another, whose requests are copies on a stream. Next: offloaded_state.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>

namespace tessera::fsdp {

class StateTier {
 public:
  /// Of one request; those of earlier ones are smaller.
  using Ticket = std::uint64_t;
  StateTier() = default;
  StateTier(const StateTier&) = delete;
  StateTier& operator=(const StateTier&) = delete;
  virtual ~StateTier() = default;

  /// Room for so many bytes in all, zeros at first. Errors: kIo; what was there stays.
  virtual void reserve(std::int64_t bytes) = 0;
  /// Begins to fill `bytes`, kByte and contiguous, which stay untouched until wait().
  virtual Ticket read(std::int64_t offset, const at::Tensor& bytes) = 0;
  /// Begins to write them. A read of the same place that is asked for later finds them.
  virtual Ticket write(std::int64_t offset, const at::Tensor& bytes) = 0;
  /// What this thread does from here on comes behind that request and all before it. Errors: kIo of
  /// the first that failed; none is tried after it, until the error has been thrown.
  virtual void wait(Ticket ticket) = 0;
  /// Of the last request so far; 0: there was none, and nothing is waited for.
  virtual Ticket last() const = 0;
  /// For how long it has read and written so far.
  virtual double busy_ms() const = 0;
};

/// `folder`, `whose`: as ScratchFile, whose errors it has. Threads: one.
std::unique_ptr<StateTier> make_file_tier(std::filesystem::path folder, std::string whose);

}  // namespace tessera::fsdp
