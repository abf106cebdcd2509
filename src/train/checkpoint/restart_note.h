// What earlier attempts of a job chose to go on from: torchrun starts the same command again, and
// checkpoint.load_step is meant for the first attempt that comes so far.
//
// The note lies in the checkpoint folder. Outside torchrun there is none. Pure.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

namespace tessera::train {

class RestartNote {
 public:
  /// Of this process's job, by torchrun's variables.
  explicit RestartNote(const std::filesystem::path& folder);

  /// The first attempt: what lies there is another job's. Errors: kIo.
  void forget_other_jobs() const;
  /// Whether an earlier attempt of this job began with `load_step` and came as far as write().
  bool has(std::int64_t load_step) const;
  /// `latest` is what attempts after this one go on from. Errors: kIo.
  void write(std::int64_t load_step) const;

 private:
  std::string text(std::int64_t load_step) const;

  std::filesystem::path path_;
  std::string job_;
  bool under_torchrun_ = false;
  bool first_attempt_ = true;
};

}  // namespace tessera::train
