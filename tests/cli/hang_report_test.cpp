// Hangs are injected into real runs (faulty_rank.cpp), drawn from kind x place x layout: the report
// names the rank that went wrong and the unit in which it did, within 10 s after the timeout, or after
// the loss of a rank that was killed.
//
// TESSERA_HANG_CASES of them from TESSERA_HANG_FROM on; TESSERA_HANG_LIST=FILE lists what each said.
#include <array>
#include <chrono>
#include <fstream>
#include <mutex>
#include <random>
#include <sstream>
#include <thread>

#include "cli/pipeline_run.h"
#include "proof.h"
#include "support/test.h"

namespace tessera::cli::hang_report_test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr int kCases = 5;  // scripts/full check: a hundred
constexpr seconds kTimeout{3};
constexpr seconds kWithin{10};

struct Layout {
  const char* name;
  int ranks;
  const char* degrees;  ///< of [parallelism]
  bool experts = false;
  std::vector<const char*> places = {};  ///< in addition to those that every layout has
};

const std::vector<Layout>& layouts() {
  static const std::vector<Layout> all{
      {"dp 2", 2, ""},
      {"dp 4", 4, ""},
      {"replicas 2, dp 2", 4, "data_parallel_replicate_degree = 2\n"},
      {"dp 2, tp 2", 4, "tensor_parallel_degree = 2\n", false, {"tp"}},
      {"dp 4, ep 2", 4, "expert_parallel_degree = 2\n", true, {"experts"}},
      {"pp 2, dp 2", 4, "pipeline_parallel_degree = 2\n", false, {"message"}},
      {"pp 2, tp 2",
       4,
       "pipeline_parallel_degree = 2\ntensor_parallel_degree = 2\n",
       false,
       {"tp", "message"}}};
  return all;
}

struct Case {
  int number = 0;
  const Layout* layout = nullptr;
  int rank = 0;
  std::string kind, place;
  int step = 0;
  unsigned draw = 0;
};

std::string to_string(const Case& one) {
  return concat("case ", one.number, " (", one.layout->name, "): rank ", one.rank, " ", one.kind,
                " at ", one.place, ", step ", one.step, ", draw ", one.draw);
}

/// The same for a number in every run of the test.
Case drawn(int number) {
  std::mt19937 random(static_cast<unsigned>(number) * 7919U + 44U);
  const auto pick = [&](const auto& list) { return list[random() % std::size(list)]; };
  Case one;
  one.number = number;
  one.layout = &layouts()[random() % layouts().size()];
  one.rank = static_cast<int>(random() % static_cast<unsigned>(one.layout->ranks));
  const bool is_pipeline = std::string_view(one.layout->name).starts_with("pp");
  const bool is_sharded = std::string_view(one.layout->name) != "pp 2, tp 2";
  std::vector<const char*> places = one.layout->places;
  places.insert(places.end(), {"optimizer", "control"});
  if (is_sharded) {
    places.insert(places.end(), {"forward", "reduction"});
    // The units of a stage stay gathered for its step.
    if (!is_pipeline) places.push_back("backward");
  }
  one.place = pick(places);
  // A stage hands on activations or gradients in every layout of two stages.
  const std::array<const char*, 6> kinds{"kill", "stop", "compute", "skip", "twice", "swap"};
  one.kind = kinds[random() % (one.place == "message" ? 4 : kinds.size())];
  one.step = 3 + static_cast<int>(random() % 3);
  one.draw = static_cast<unsigned>(random() % 1000);
  return one;
}

class HangFolder : public PipelineFolder {
 public:
  explicit HangFolder(const Case& one) {
    // Layers large enough to be gathered one by one.
    for (const char* name : {"model.json", "moe.json"}) {
      auto model = nlohmann::json::parse(read_file(*this / name));
      model.update({{"hidden_size", 64},
                    {"head_dim", 32},
                    {"intermediate_size", 512},
                    {"num_hidden_layers", 4}});
      if (model.contains("moe_intermediate_size")) model["moe_intermediate_size"] = 256;
      write(name, model.dump());
    }
    std::string toml = read_file(*this / "run.toml");
    const auto replace = [&](const std::string& what, const std::string& with) {
      const auto at = toml.find(what);
      if (at != std::string::npos) toml.replace(at, what.size(), with);
    };
    if (one.layout->experts) replace("model.json", "moe.json");
    replace("steps = 3", "steps = 1000000");
    toml += concat("[parallelism]\n", one.layout->degrees,
                   "[comm]\ntimeout_seconds = ", kTimeout.count(),
                   "\n[checkpoint]\nenable = false\n[job]\ndump_folder = \"run\"\n");
    write("run.toml", toml);
    write("fault.txt",
          concat(one.rank, " ", one.kind, " ", one.place, " ", one.step, " ", one.draw));
    std::filesystem::create_directories(*this / "run/logs");
    std::filesystem::create_directories(*this / "run/metrics");
  }
};

struct Said {
  std::string why_wrong;  ///< "": right
  bool hangs = true;  ///< and does not end by an error that the rank that went wrong finds itself
  std::string cause;
  std::string truth;
  bool named_first = false;  ///< the unit, and not only as one where the rank may still be
  double seconds = 0;        ///< from the loss or the timeout to the end of all processes
};

std::string after(const std::string& text, const std::string& what) {
  const auto at = text.find(what);
  return at == std::string::npos ? std::string() : text.substr(at + what.size());
}

/// The part of a report's line where the unit has to stand.
std::string place_named_in(const std::string& cause, const std::string& kind) {
  if (kind == "twice" || kind == "swap") return cause;  // both of two are named
  for (const char* before : {"should be in ", "by the order comes "}) {
    const std::string named = after(cause, before);
    if (!named.empty()) return named.substr(0, named.find("; "));
  }
  return {};
}

Said run_case(const Case& one) {
  const HangFolder folder(one);
  Process run(folder.path(), {TESSERA_FAULTY_RANK, std::to_string(one.layout->ranks)});
  Said said;
  if (!wait_until(seconds(90), [&] { return exists(folder / "truth.txt"); })) {
    said.why_wrong = "no fault: " + run.err();
    return said;
  }
  const auto began = std::chrono::steady_clock::now();
  std::istringstream truth(read_file(folder / "truth.txt"));
  std::string op, unit;
  std::getline(truth, op);
  std::getline(truth, unit);
  said.truth = concat(op, " of ", unit);
  const bool is_loss = one.kind == "kill";
  const auto limit = kWithin + (is_loss ? seconds(0) : kTimeout);
  const auto code = run.wait(limit + seconds(20));
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
  said.seconds = took.count() - (is_loss ? 0.0 : static_cast<double>(kTimeout.count()));
  const std::string err = run.err();
  // Rank 0 takes the store with it, by which the others speak: each that waits for it says so itself.
  auto causes = lines_with(err, "  cause: ");
  if (one.rank != 0 || (one.kind != "kill" && one.kind != "stop")) {
    causes.resize(std::min<std::size_t>(causes.size(), 1));
  }
  said.hangs = !causes.empty() || run.last_error_line().find(concat("rank ", one.rank, ": ")) != 0;
  bool names_unit = false, names_rank = !causes.empty();
  for (const std::string& cause : causes) {
    said.cause += cause + "\n";
    names_rank = names_rank && cause.find(concat("cause: rank ", one.rank, " ")) != cause.npos;
    const std::string place = place_named_in(cause, one.kind);
    names_unit = names_unit || place.find(unit) != place.npos;
    const std::string first = place.substr(0, place.find(", or still in "));
    said.named_first = said.named_first || first.find(unit) != first.npos;
  }
  if (!code || *code == 0) {
    said.why_wrong = "it did not end with an error";
  } else if (!names_rank) {
    said.why_wrong = "another rank";
  } else if (!names_unit) {
    said.why_wrong = "another unit";
  } else if (said.seconds > static_cast<double>(kWithin.count())) {
    said.why_wrong = "too late";
  }
  if (!said.why_wrong.empty()) said.why_wrong += "\n" + err;
  return said;
}

TEST(HangReport, NamesTheRankThatWentWrongAndItsUnit) {
  const auto count = static_cast<int>(test::environment_number("TESSERA_HANG_CASES", kCases));
  const auto from = static_cast<int>(test::environment_number("TESSERA_HANG_FROM", 1));
  const auto list = base::environment_variable("TESSERA_HANG_LIST");
  std::ofstream listed(list.value_or("/dev/null"));
  std::mutex mutex;
  int right = 0, first = 0;
  double slowest = 0;
  std::string wrong;
  int taken = 0, no_hang = 0;
  const auto work = [&] {
    for (;;) {
      int number = 0;
      {
        const std::lock_guard lock(mutex);
        if (taken - no_hang == count) return;
        number = from + taken++;
      }
      const Case one = drawn(number);
      const Said said = run_case(one);
      const std::lock_guard lock(mutex);
      if (!said.hangs) {
        ++no_hang;  // another one is drawn
        continue;
      }
      right += said.why_wrong.empty() ? 1 : 0;
      first += said.why_wrong.empty() && said.named_first ? 1 : 0;
      slowest = std::max(slowest, said.seconds);
      listed << (said.why_wrong.empty() ? "right " : "WRONG ") << to_string(one)
             << "\n  truth: " << said.truth << "\n  " << said.seconds << " s\n"
             << said.cause << std::endl;
      if (!said.why_wrong.empty()) {
        listed << said.why_wrong << std::endl;
        wrong += concat(to_string(one), ", ", said.truth, ": ", said.why_wrong, "\n");
      }
    }
  };
  std::thread second(work);
  work();
  second.join();
  std::cout << concat(right, " of ", count, " right (", first,
                      " name the unit first), the slowest ", slowest, " s\n");
  EXPECT_LE(no_hang, count / 10) << "which end by an error of their own";
  EXPECT_GE(right, count - count / 50) << wrong;
}

}  // namespace
}  // namespace tessera::cli::hang_report_test
