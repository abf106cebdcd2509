// TensorBoard's event files: scalars by step, written without protobuf.
//
// A file is a sequence of TFRecords (length, masked CRC32C of the length, bytes, masked CRC32C of
// the bytes), each an `Event` message of which four fields are needed: wall_time, step,
// file_version or session_log, summary. Pure. Source: tensorflow's event.proto, summary.proto and
// record_writer.cc.
//
// A resumed run writes another file. Its second record is a session log with status START at the
// first step that it will write: readers then drop what earlier files say of that step and of later
// ones, so steps that ran twice are shown once.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/appended_file.h"

namespace tessera {

struct Scalar {
  std::string tag;
  double value = 0;  ///< stored as float32, as TensorBoard does
};

/// Frames `payload` as one record.
std::string tfrecord(std::string_view payload);

/// The three kinds of Event message; `wall_time` in seconds since 1970.
std::string version_event(double wall_time);
std::string session_start_event(double wall_time, std::int64_t step);
std::string scalars_event(double wall_time, std::int64_t step, const std::vector<Scalar>& scalars);

/// One event file of a run.
class EventFile {
 public:
  /// Begins a new file in `folder` (made if missing) whose name sorts after those that are there.
  /// `first_step` is the first that will be written; a run that starts from scratch (1) removes the
  /// event files of an earlier one. Errors: kIo.
  EventFile(const std::filesystem::path& folder, std::int64_t first_step);

  /// Hands one record to the system. Errors: kIo.
  void append(std::int64_t step, const std::vector<Scalar>& scalars);

  const std::filesystem::path& path() const { return file_->path(); }

 private:
  void write(std::string_view event);

  std::optional<AppendedFile> file_;
};

}  // namespace tessera
