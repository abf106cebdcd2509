#include "io/tensorboard.h"

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <system_error>

#include "base/hash.h"
#include "tessera/error.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kPrefix = "events.out.tfevents.";
constexpr std::size_t kSecondsDigits = 10;

// Field numbers with the wire type in the low three bits: 0 varint, 1 eight bytes, 2 length and
// bytes, 5 four bytes.
constexpr char kEventWallTime = 1 << 3 | 1;
constexpr char kEventStep = 2 << 3 | 0;
constexpr char kEventFileVersion = 3 << 3 | 2;
constexpr char kEventSummary = 5 << 3 | 2;
constexpr char kEventSessionLog = 7 << 3 | 2;
constexpr char kSummaryValue = 1 << 3 | 2;
constexpr char kValueTag = 1 << 3 | 2;
constexpr char kValueSimple = 2 << 3 | 5;
constexpr char kSessionStatus = 1 << 3 | 0;
constexpr char kSessionStart = 1;

template <class Unsigned>
std::string little_endian(Unsigned value) {
  std::string bytes;
  for (std::size_t i = 0; i < sizeof value; ++i) {
    bytes += static_cast<char>(static_cast<unsigned char>(value & 0xFFU));
    value = static_cast<Unsigned>(value >> 8U);
  }
  return bytes;
}

std::string varint(std::uint64_t value) {
  std::string bytes;
  for (; value >= 0x80U; value >>= 7U) bytes += static_cast<char>((value & 0x7FU) | 0x80U);
  return bytes += static_cast<char>(value);
}

std::string field(char key, std::string_view bytes) {
  return key + varint(bytes.size()) + std::string(bytes);
}

std::string event(double wall_time, std::int64_t step, const std::string& what) {
  return kEventWallTime + little_endian(std::bit_cast<std::uint64_t>(wall_time)) + kEventStep +
         varint(static_cast<std::uint64_t>(step)) + what;
}

/// A plain checksum of data that holds checksums is weak: TFRecords rotate it and add a constant.
std::string masked_crc(std::string_view bytes) {
  const std::uint32_t crc = crc32c(bytes);
  return little_endian((crc >> 15U | crc << 17U) + 0xA282EAD8U);
}

double now_in_seconds() {
  const auto since_1970 = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration<double>(since_1970).count();
}

std::vector<std::string> event_files(const fs::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) {
    const std::string name = entry.path().filename();
    if (!name.starts_with(kPrefix)) continue;
    // nor is it removed: the user who placed it there meant it for something
    require_no_link(entry.path());
    names.push_back(name);
  }
  std::sort(names.begin(), names.end());
  return names;
}

/// Returns the next file's name. Readers take files in the order of their names, so the seconds in
/// it never go back, even if the clock does, and a number follows for files of one second.
std::string next_name(const std::vector<std::string>& names) {
  auto seconds = static_cast<long long>(now_in_seconds());
  auto number = static_cast<long long>(names.size());
  if (!names.empty()) {
    const std::string last = names.back().substr(kPrefix.size());
    seconds = std::max(seconds, std::atoll(last.substr(0, kSecondsDigits).c_str()));
    // Other files may be gone, so the number of the remaining ones may be taken.
    if (const auto point = last.find('.'); point != std::string::npos) {
      number = std::max(number, std::atoll(last.substr(point + 1).c_str()) + 1);
    }
  }
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), "%010lld.%04lld", seconds, number);
  return std::string(kPrefix) + text.data();
}

}  // namespace

std::string tfrecord(std::string_view payload) {
  const std::string length = little_endian(std::uint64_t{payload.size()});
  return length + masked_crc(length) + std::string(payload) + masked_crc(payload);
}

std::string version_event(double wall_time) {
  return event(wall_time, 0, field(kEventFileVersion, "brain.Event:2"));
}

std::string session_start_event(double wall_time, std::int64_t step) {
  return event(wall_time, step,
               field(kEventSessionLog, std::string{kSessionStatus, kSessionStart}));
}

std::string scalars_event(double wall_time, std::int64_t step, const std::vector<Scalar>& scalars) {
  std::string summary;
  for (const Scalar& scalar : scalars) {
    const auto value = std::bit_cast<std::uint32_t>(static_cast<float>(scalar.value));
    summary +=
        field(kSummaryValue, field(kValueTag, scalar.tag) + kValueSimple + little_endian(value));
  }
  return event(wall_time, step, field(kEventSummary, summary));
}

EventFile::EventFile(const fs::path& folder, std::int64_t first_step) {
  std::error_code error;
  fs::create_directories(folder, error);
  TESSERA_CHECK(!error, ErrorKind::kIo, folder.string(), ": cannot be made (", error.message(),
                ")");
  fs::path path;
  try {
    auto names = event_files(folder);
    if (first_step <= 1) {
      for (const std::string& name : names) fs::remove(folder / name);
      names.clear();
    }
    path = folder / next_name(names);
  } catch (const fs::filesystem_error& failure) {
    throw Error(ErrorKind::kIo, concat(folder.string(), ": ", failure.code().message()));
  }
  file_.emplace(path, AppendedFile::From::kNothing);
  const double now = now_in_seconds();
  write(version_event(now));
  write(session_start_event(now, first_step));
}

void EventFile::append(std::int64_t step, const std::vector<Scalar>& scalars) {
  write(scalars_event(now_in_seconds(), step, scalars));
}

void EventFile::write(std::string_view event) { file_->append(tfrecord(event)); }

}  // namespace tessera
