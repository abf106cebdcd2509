#include "train/batch_memory.h"

#include <sys/sysinfo.h>

#include <exception>
#include <new>
#include <string_view>

#include "base/text/printable.h"
#include "tessera/error.h"

namespace tessera::train {
namespace {

double gib(double bytes) { return bytes / (1024.0 * 1024.0 * 1024.0); }

std::string shared_text(const RowsOfRank& rows) {
  if (rows.shared_by == 1) return "";
  return concat(" over context_parallel_degree = ", rows.shared_by, " ranks");
}

struct sysinfo this_machine() {
  struct sysinfo found = {};
  TESSERA_CHECK(::sysinfo(&found) == 0, ErrorKind::kIo,
                "sysinfo: found no size of this machine's memory, expected one");
  return found;
}

}  // namespace

double memory_bytes() {
  const auto found = this_machine();
  return (static_cast<double>(found.totalram) + static_cast<double>(found.totalswap)) *
         static_cast<double>(found.mem_unit);
}

double ram_bytes() {
  const auto found = this_machine();
  return static_cast<double>(found.totalram) * static_cast<double>(found.mem_unit);
}

void require_room(const RowsOfRank& rows, std::int64_t logits, const Room& room) {
  constexpr double kIds = 2 * sizeof(std::int64_t);
  const auto tokens = static_cast<double>(rows.tokens);
  const double of_token =
      kIds + static_cast<double>(logits) * 2 / static_cast<double>(rows.shared_by);
  const double together = static_cast<double>(rows.micro_batch) * tokens * of_token;
  TESSERA_CHECK(together <= room.computes, ErrorKind::kConfig, "training.local_batch_size: found ",
                rows.micro_batch, " rows of ", rows.tokens, " tokens a micro-batch",
                shared_text(rows), ", whose ids and logits alone are at least ", gib(together),
                " GiB, expected what the ", gib(room.computes), " GiB of ", room.computes_on,
                " hold; lower it: training.global_batch_size keeps the rows of "
                "a step");
  const double loaded = static_cast<double>(rows.rows) * tokens * kIds;
  TESSERA_CHECK(loaded <= room.host, ErrorKind::kConfig, "training.global_batch_size: found ",
                rows.rows, " rows of ", rows.tokens,
                " tokens a step on each data rank, whose ids alone are ", gib(loaded),
                " GiB, expected what the ", gib(room.host), " GiB of this machine hold; lower it");
}

bool is_out_of_memory(const std::exception& error) {
  if (dynamic_cast<const std::bad_alloc*>(&error) != nullptr) return true;
  if (dynamic_cast<const Error*>(&error) != nullptr) {  // may quote another rank's
    try {
      std::rethrow_if_nested(error);  // where in a pipeline it was
    } catch (const std::exception& inner) {
      return is_out_of_memory(inner);
    }
    return false;
  }
  const std::string_view said = error.what();
  for (const std::string_view words :
       {"can't allocate memory", "not enough memory", "out of memory", "calculation overflowed"}) {
    if (said.find(words) != said.npos) return true;
  }
  return false;
}

namespace {

/// "2.00 GiB" of "Tried to allocate 2.00 GiB. GPU 0 has", as allocators of devices say it.
std::string requested(std::string_view said) {
  constexpr std::string_view kBefore = "Tried to allocate ";
  const auto at = said.find(kBefore);
  if (at == said.npos) return "an unknown size";
  const auto rest = said.substr(at + kBefore.size());
  return std::string(rest.substr(0, rest.find(". ")));
}

/// Without the calls that led there, which libtorch lists behind it.
std::string said_by(const std::exception& error) {
  const std::string said = one_line(error.what());
  return said.substr(0, said.find(" frame #0: "));
}

std::string place_of(const DeviceThatRanOut& device, std::string_view said) {
  return concat(" of ", device.name, device.doing.empty() ? "" : " in ", device.doing,
                ": requested ", requested(said), ", held ", gib(device.held), " GiB, peak ",
                gib(device.peak), " GiB, reserved ", gib(device.reserved), " GiB");
}

}  // namespace

std::string out_of_memory_text(const RowsOfRank& rows, const std::exception& error,
                               const std::optional<DeviceThatRanOut>& device) {
  const std::string said = said_by(error);
  return concat("training.local_batch_size: found micro-batches of ", rows.micro_batch,
                " row(s) of ", rows.tokens, " tokens", shared_text(rows),
                ", for which memory ran out", device ? place_of(*device, said) : "",
                ", expected fewer; lower it "
                "(training.global_batch_size keeps the rows of a step) or training.seq_len, raise "
                "parallelism.context_parallel_degree, or set activation_checkpoint.mode (",
                said, ")");
}

std::string out_of_memory_text(std::string_view when, const std::exception& error,
                               const std::optional<DeviceThatRanOut>& device) {
  const std::string said = said_by(error);
  return concat(
      "memory ran out ", when, device ? place_of(*device, said) : "",
      ", expected room for what a rank holds (tessera inspect --contract has the table; a "
      "checkpoint adds a copy of parameters and optimizer state in the host's memory); "
      "take more ranks or a narrower precision.storage_dtype (",
      said, ")");
}

}  // namespace tessera::train
