#include "train/checkpoint/restart_note.h"

#include <span>
#include <system_error>

#include "base/environment.h"
#include "base/mapped_file.h"
#include "base/printable.h"
#include "io/atomic_file.h"
#include "tessera/error.h"

namespace tessera::train {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kMaxNoteBytes = 1 << 16;

}  // namespace

RestartNote::RestartNote(const fs::path& folder) : path_(folder / ".load_step") {
  const auto count = base::environment_variable("TORCHELASTIC_RESTART_COUNT");
  under_torchrun_ = count.has_value();
  first_attempt_ = count.value_or("0") == "0";
  job_ = base::environment_variable("TORCHELASTIC_RUN_ID").value_or("");
}

std::string RestartNote::text(std::int64_t load_step) const {
  return concat(load_step, "\n", job_, "\n");
}

void RestartNote::forget_other_jobs() const {
  if (!under_torchrun_ || !first_attempt_) return;
  std::error_code error;
  fs::remove(path_, error);
  TESSERA_CHECK(!error, ErrorKind::kIo, "cannot remove ", shown(path_), ": ", error.message());
}

bool RestartNote::has(std::int64_t load_step) const {
  std::error_code ignored;
  return under_torchrun_ && !first_attempt_ && fs::exists(path_, ignored) &&
         read_text_file(path_, kMaxNoteBytes) == text(load_step);
}

void RestartNote::write(std::int64_t load_step) const {
  if (!under_torchrun_ || load_step < 0) return;
  write_atomically(path_, text(load_step));
}

}  // namespace tessera::train
