#include <nlohmann/json.hpp>

#include "base/hash.h"
#include "base/trace.h"
#include "io/tensorboard.h"
#include "support/temporary_folder.h"

namespace tessera::chrome_trace_test {
namespace {

using nlohmann::json;
using std::chrono::nanoseconds;

TEST(ChromeTrace, IsOneProcessARankAndOneThreadARow) {
  const auto origin = TraceClock::time_point(nanoseconds(5'000'000));
  const TraceSpan gather{TraceRow::kGathers,
                         "layer \"0\"",
                         origin + nanoseconds(1500),
                         origin + nanoseconds(4000),
                         {{"sent_bytes", std::int64_t{4096}}, {"queued_ms", 0.5}, {"unit", "u"}}};
  const TraceSpan early{TraceRow::kCompute, "step 3", origin - nanoseconds(250), origin};
  const json trace = json::parse(
      chrome_trace({chrome_events({gather, early}, 0, origin), chrome_events({}, 1, origin)}));
  std::vector<json> spans;
  std::map<std::pair<int, int>, std::string> rows;
  std::map<int, std::string> processes;
  for (const json& event : trace["traceEvents"]) {
    if (event["ph"] == "X") spans.push_back(event);
    if (event["name"] == "thread_name") {
      rows[{event["pid"], event["tid"]}] = event["args"]["name"];
    }
    if (event["name"] == "process_name") processes[event["pid"]] = event["args"]["name"];
  }
  EXPECT_EQ(processes, (std::map<int, std::string>{{0, "rank 0"}, {1, "rank 1"}}));
  ASSERT_EQ(spans.size(), 2U);
  EXPECT_EQ(spans[0]["name"], "step 3");
  EXPECT_EQ(spans[0]["ts"], -0.25) << "microseconds from the origin";
  EXPECT_EQ(spans[1]["ts"], 1.5);
  EXPECT_EQ(spans[1]["dur"], 2.5);
  EXPECT_EQ(spans[1]["name"], "layer \"0\"");
  EXPECT_EQ(spans[1]["args"],
            json::parse(R"({"sent_bytes": 4096, "queued_ms": 0.5, "unit": "u"})"));
  EXPECT_EQ((rows[{0, spans[0]["tid"]}]), "compute");
  EXPECT_EQ((rows[{0, spans[1]["tid"]}]), "gathers");
}

TEST(ChromeTrace, TextThatIsNotUtf8IsStillJson) {
  const auto now = TraceClock::now();
  const auto text =
      chrome_trace({chrome_events({{TraceRow::kWaits, "bad \xFF name", now, now}}, 0, now)});
  EXPECT_TRUE(json::accept(text));
}

using namespace std::string_literals;

std::vector<std::string> names_in(const std::filesystem::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    names.push_back(entry.path().filename());
  }
  std::sort(names.begin(), names.end());
  return names;
}

TEST(TensorBoardRecord, LengthAndPayloadCarryMaskedChecksums) {
  // The masked CRC32C of eight bytes 03 00 .. is 0x90A3F74A, of "abc" 0x21BFD4BF: worked out from
  // the definition, (crc >> 15 | crc << 17) + 0xA282EAD8.
  const auto masked = [](std::string_view bytes) {
    const std::uint64_t crc = crc32c(bytes);
    return static_cast<std::uint32_t>((crc >> 15U) + (crc << 17U & 0xFFFFFFFFU) + 0xA282EAD8U);
  };
  const std::string length = "\x03\0\0\0\0\0\0\0"s;
  std::string expected = length;
  for (int byte = 0; byte < 4; ++byte) {
    expected += static_cast<char>(masked(length) >> (8 * byte) & 0xFFU);
  }
  expected += "abc";
  for (int byte = 0; byte < 4; ++byte) {
    expected += static_cast<char>(masked("abc") >> (8 * byte) & 0xFFU);
  }
  EXPECT_EQ(tfrecord("abc"), expected);
  EXPECT_EQ(tfrecord("").size(), 16U);
}

TEST(TensorBoardEvent, VersionIsFieldThree) {
  // wall_time 1.0 = 0x3FF0000000000000, step 0, file_version "brain.Event:2".
  EXPECT_EQ(version_event(1.0), "\x09\0\0\0\0\0\0\xF0\x3F\x10\0\x1A\x0D"s + "brain.Event:2");
}

TEST(TensorBoardEvent, ScalarsAreFieldFiveWithTagAndFloat) {
  // step 300 is the varint AC 02; 0.5f = 0x3F000000; one value of 2 + 4 + 5 bytes.
  EXPECT_EQ(scalars_event(1.0, 300, {{"loss", 0.5}}),
            "\x09\0\0\0\0\0\0\xF0\x3F\x10\xAC\x02\x2A\x0D\x0A\x0B\x0A\x04loss\x15\0\0\0\x3F"s);
}

TEST(TensorBoardEvent, SessionStartIsFieldSevenWithStatusOne) {
  EXPECT_EQ(session_start_event(1.0, 5), "\x09\0\0\0\0\0\0\xF0\x3F\x10\x05\x3A\x02\x08\x01"s);
}

TEST(TensorBoardEvent, LongTagsAndLargeStepsTakeLongerVarints) {
  const std::string tag(200, 't');
  const std::string event = scalars_event(0.0, std::int64_t{1} << 40, {{tag, 1.0}});
  // 200 = C8 01 before the tag; the value has 3 + 200 + 5 = 208 bytes, the summary 3 + 208.
  EXPECT_NE(event.find("\x2A\xD3\x01\x0A\xD0\x01\x0A\xC8\x01ttt"s), std::string::npos);
  EXPECT_NE(event.find("\x10\x80\x80\x80\x80\x80\x20"s), std::string::npos);
}

TEST(EventFile, BeginsWithVersionAndSessionStart) {
  const TemporaryFolder folder;
  EventFile file(folder / "tb", 1);
  const std::string begun = read_file(file.path());
  file.append(1, {{"loss", 2.0}});
  const std::string grown = read_file(file.path());
  // Without the wall times, which cannot be foreseen: the kinds of message and their sizes.
  EXPECT_EQ(begun.size(),
            tfrecord(version_event(0)).size() + tfrecord(session_start_event(0, 1)).size());
  EXPECT_EQ(grown.substr(0, begun.size()), begun) << "appended, and there without closing the file";
  EXPECT_EQ(grown.size() - begun.size(), tfrecord(scalars_event(0, 1, {{"loss", 2.0}})).size());
}

TEST(EventFile, AResumedRunWritesAFurtherFileBehindTheOthers) {
  const TemporaryFolder folder;
  std::vector<std::string> written;
  for (const std::int64_t first_step : {1, 5, 9, 5}) {
    written.push_back(EventFile(folder / "tb", first_step).path().filename());
  }
  EXPECT_EQ(names_in(folder / "tb"), written) << "sorted by name as they were written";
}

TEST(EventFile, AClockThatWasSetBackKeepsTheOrder) {
  const TemporaryFolder folder;
  const std::string future = "events.out.tfevents.9999999999.0000";
  folder.write("tb/" + future, "");
  const EventFile file(folder / "tb", 7);
  EXPECT_GT(file.path().filename().string(), future);
}

TEST(EventFile, ARunThatStartsAgainRemovesTheFilesOfAnEarlierOneOnly) {
  const TemporaryFolder folder;
  {
    const EventFile earlier(folder / "tb", 1);
  }
  {
    const EventFile resumed(folder / "tb", 4);
  }
  folder.write("tb/notes.txt", "kept");
  const EventFile file(folder / "tb", 1);
  EXPECT_EQ(names_in(folder / "tb"),
            (std::vector<std::string>{file.path().filename(), "notes.txt"}));
}

// Naive: opened by its name, a link that somebody placed there leads the records away; passed by,
// it is what a reader takes for the run's. Like metrics and logs it is refused, and stays.
TEST(EventFile, ALinkAmongThemIsRefusedAndItsTargetKept) {
  const TemporaryFolder folder;
  folder.write("target", "kept");
  folder.write("tb/notes.txt", "");
  const auto link = folder / "tb/events.out.tfevents.9999999999.0001";
  for (const char* target : {"target", "nothing"}) {
    std::filesystem::remove(link);
    std::filesystem::create_symlink(folder / target, link);
    for (const std::int64_t first_step : {1, 7}) {
      EXPECT_REFUSED(kIo, EventFile(folder / "tb", first_step),
                     "9999999999.0001': found a symbolic link, expected a regular file");
    }
    EXPECT_TRUE(std::filesystem::is_symlink(link));
  }
  EXPECT_EQ(read_file(folder / "target"), "kept");
  EXPECT_EQ(names_in(folder / "tb"),
            (std::vector<std::string>{link.filename().string(), "notes.txt"}));
}

TEST(EventFile, SaysWhereItCannotWrite) {
  const std::string message = error_of(ErrorKind::kIo, [] { EventFile("/dev/null/tb", 1); });
  EXPECT_THAT(message, Says("/dev/null/tb"));
}

}  // namespace
}  // namespace tessera::chrome_trace_test
