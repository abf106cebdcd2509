// The page of a check: well formed for any report, of a bounded size, with nothing in it that
// loads or runs, and with pictures that show the report's numbers.
#include "check/page.h"

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <random>

#include "base/text/printable.h"
#include "check/markup.h"
#include "check/schedule_picture.h"
#include "check/step_memory.h"
#include "pipeline/kinds.h"
#include "pipeline/picture.h"
#include "support/temporary_folder.h"
#include "support/test.h"

namespace tessera::check::page_test {
namespace {

constexpr std::int64_t kGiB = std::int64_t{1} << 30;

int count(const std::string& text, std::string_view what) {
  int found = 0;
  for (auto at = text.find(what); at != std::string::npos; at = text.find(what, at + 1)) ++found;
  return found;
}

/// Passes of a step of `layers` units, which keep `kept` each.
std::vector<HeldInPass> passes_of(int layers, int micro_batches, std::int64_t base,
                                  std::int64_t kept) {
  std::vector<HeldInPass> passes;
  for (int batch = 0; batch < micro_batches; ++batch) {
    std::int64_t now = base;
    for (int i = 0; i < layers; ++i, now += kept) {
      passes.push_back({concat("model.layers.", i), true, now, now + 3 * kept, now + kept});
    }
    passes.push_back({"(root)", true, base, now + 5 * kept, now});
    for (int i = layers; i-- > 0; now -= kept) {
      passes.push_back({concat("model.layers.", i), false, now, now + 4 * kept, now - kept});
    }
    passes.push_back({"(root)", false, base + layers * kept, base + (layers + 7) * kept, base});
  }
  return passes;
}

Place place_of(int pp, int layers, int micro_batches) {
  const std::int64_t kept = kGiB / 64;
  Place place{.pp = pp, .rank = 8 * pp};
  place.held = {{"parameters", kGiB},
                {"gradients", kGiB},
                {"moments", 2 * kGiB},
                {"master", 0},
                {"unsharded peak", kGiB},
                {"reductions", 2 * kGiB},
                {"activations", (layers + 7) * kept}};
  place.peak = 7 * kGiB + (layers + 7) * kept;
  place.passes = passes_of(layers, micro_batches, 4 * kGiB, kept);
  place.sent = {{"dp", "gathers of parameters", 11 * kGiB},
                {"dp", "sums over replicas", 0},
                {"pp", "messages between stages", (pp + 1) * kGiB}};
  return place;
}

Report report_of(int places, int layers = 4, int micro_batches = 1) {
  Report report{.model = "configs/models/small-1b/config.json",
                .layout = "pp 1 x dp_shard 8",
                .world = 8,
                .compared = {"contracts of 3 ranks"}};
  for (int pp = 0; pp < places; ++pp) {
    report.places.push_back(place_of(pp, layers, micro_batches));
  }
  report.time = StepTime{.by = "h100",
                         .step_ms = 200.0,
                         .compute_ms = 120.0,
                         .again_ms = 20.0,
                         .waited_ms = 50.0,
                         .rest_ms = 10.0};
  return report;
}

std::string drawn_schedule(int ranks, int micro_batches) {
  const auto schedule =
      make_schedule(pipeline::kind_named("1F1B"), pipeline::Shape{ranks, 1, micro_batches});
  const pipeline::Costs costs(static_cast<std::size_t>(schedule.stages()));
  return to_svg(schedule, simulate(schedule, costs));
}

/// Texts that break out of careless markup, terminals, parsers and readers' eyes.
std::string hostile(std::mt19937_64& random) {
  static const std::vector<std::string> kParts{"<script>alert(1)</script>",
                                               "</title>",
                                               "</svg>",
                                               "\"",
                                               "'",
                                               "&",
                                               "&lt;",
                                               "&#0;",
                                               "]]>",
                                               "<!--",
                                               "--!>",
                                               "<img src=x onerror=alert(1)>",
                                               "\" onload=\"alert(1)",
                                               "</style>",
                                               "</code>",
                                               "<?xml?>",
                                               "javascript:alert(1)",
                                               std::string(1, '\0'),
                                               "\x1b[31m",
                                               "\x7f",
                                               "\n",
                                               "\r\n",
                                               "\t",
                                               "\xff",
                                               "\xc0\x80",
                                               "\xed\xa0\x80",
                                               "\xef\xbf\xbe",
                                               "\xef\xbf\xbf",
                                               "\xf4\x90\x80\x80",
                                               "\xe2\x82",
                                               "\xc2\x85",
                                               "\u202e",
                                               "\u2066",
                                               "\u2028",
                                               "\u00e4",
                                               "\u4e2d\u6587",
                                               "\U0001F600",
                                               "model.layers.3",
                                               " ",
                                               "{{x}}",
                                               "%s",
                                               "\\x41"};
  std::string text;
  const std::size_t parts = random() % 12;
  for (std::size_t i = 0; i < parts; ++i) text += kParts[random() % kParts.size()];
  if (random() % 16 == 0) text += std::string(20000, random() % 2 == 0 ? '"' : 'A');
  return text;
}

double any_ms(std::mt19937_64& random) {
  static const std::vector<double> kValues{0.0, 1e-9, 1.0, 3.7e3, 1e18, -1.0, NAN, INFINITY};
  return kValues[random() % kValues.size()];
}

Place hostile_place(std::mt19937_64& random, int pp) {
  const auto any_bytes = [&] {
    return static_cast<std::int64_t>(random() % (1ULL << (random() % 50)));
  };
  Place place{.pp = pp, .rank = static_cast<int>(random() % 4096), .peak = any_bytes()};
  for (const char* name : {"parameters", "reductions", "activations"}) {
    if (random() % 4 != 0) place.held.push_back({name, any_bytes()});
  }
  for (std::size_t i = random() % 5; i > 0; --i)
    place.held.push_back({hostile(random), any_bytes()});
  for (std::size_t i = random() % 5; i > 0; --i) {
    place.sent.push_back({hostile(random), hostile(random), any_bytes()});
  }
  for (std::size_t i = random() % (random() % 2 == 0 ? 900 : 9); i > 0; --i) {
    place.passes.push_back(
        {hostile(random), random() % 2 == 0, any_bytes(), any_bytes(), any_bytes()});
  }
  return place;
}

Report hostile_report(std::mt19937_64& random) {
  Report report{.model = hostile(random),
                .layout = hostile(random),
                .world = static_cast<int>(random() % 4096),
                .knows_tokens = random() % 2 == 0};
  for (std::size_t i = random() % 9; i > 0; --i) {
    report.findings.push_back({.kind = static_cast<FindingKind>(random() % 11),
                               .operation = hostile(random),
                               .unit = hostile(random),
                               .parameter = hostile(random),
                               .axis = hostile(random),
                               .found = hostile(random),
                               .expected = hostile(random),
                               .mend = hostile(random)});
  }
  for (std::size_t i = random() % 4; i > 0; --i) report.notes.push_back(hostile(random));
  for (std::size_t i = random() % 4; i > 0; --i) report.compared.push_back(hostile(random));
  const int places = static_cast<int>(random() % 12);
  for (int pp = 0; pp < places; ++pp) report.places.push_back(hostile_place(random, pp));
  if (random() % 2 == 0) report.memory = static_cast<std::int64_t>(random() % (1ULL << 40));
  report.memory_from = hostile(random);
  if (random() % 2 == 0) {
    report.time = StepTime{.by = hostile(random),
                           .step_ms = any_ms(random),
                           .compute_ms = any_ms(random),
                           .again_ms = any_ms(random),
                           .waited_ms = any_ms(random),
                           .rest_ms = any_ms(random)};
    if (random() % 2 == 0) report.time->bubble = any_ms(random);
  }
  const std::string schedule = drawn_schedule(2, 3);
  if (random() % 2 == 0) report.schedule = schedule.substr(0, random() % (schedule.size() + 1));
  if (random() % 4 == 0)
    report.schedule.insert(random() % (report.schedule.size() + 1), hostile(random));
  return report;
}

/// The complaints of the two parsers of Python about the pages in a folder; "" where all is well.
std::string said_by_parsers(const std::filesystem::path& folder) {
  const std::filesystem::path said = folder / "said.txt";
  const std::string command = concat("'" TESSERA_PYTHON3 "' '" TESSERA_PAGE_PARSER "' '",
                                     folder.native(), "' > '", said.native(), "' 2>&1");
  const int code = std::system(command.c_str());  // NOLINT(cert-env33-c): words of our own
  const std::string text = read_file(said);
  return code == 0 ? text : concat(text, "exit code ", code);
}

// TESSERA_PAGE_SEED=N draws others.
TEST(Page, IsWellFormedForAnyReport) {
  const char* const seed = std::getenv("TESSERA_PAGE_SEED");
  std::mt19937_64 random(seed == nullptr ? 1 : std::strtoull(seed, nullptr, 10));
  const TemporaryFolder folder;
  for (int i = 0; i < 60; ++i) {
    const std::string page = page_of(hostile_report(random));
    EXPECT_LE(page.size(), 500'000U);
    folder.write(concat(i, ".html"), page);
  }
  EXPECT_EQ(said_by_parsers(folder.path()), "60 pages\n");
}

// The parsers can fail: what a page never has is named.
TEST(Page, ParsersNameWhatAPageMayNotHave) {
  const std::string page = page_of(report_of(1));
  const auto said_of = [&](const std::string& instead, const std::string& of) {
    const TemporaryFolder folder;
    std::string changed = page;
    changed.replace(changed.find(of), of.size(), instead);
    folder.write("0.html", changed);
    return said_by_parsers(folder.path());
  };
  EXPECT_THAT(said_of("<main><script>1</script>", "<main>"), Says("script"));
  EXPECT_THAT(said_of("<main onclick=\"x\">", "<main>"), Says("onclick"));
  EXPECT_THAT(said_of("<main><img src=\"http://x\"/>", "<main>"), Says("img"));
  EXPECT_THAT(said_of("<main><b>", "<main>"), Says("mismatched tag"));
  EXPECT_THAT(said_of("<main>a & b", "<main>"), Says("not well-formed"));
  EXPECT_THAT(said_of("<style>@import \"x\";", "<style>"), Says("import"));
}

TEST(Page, SaysTotalsFindingsAndNotes) {
  Report report = report_of(1);
  report.memory = 80 * kGiB;
  report.memory_from = "memory of h100";
  report.notes = {"gradients are rounded"};
  std::string page = page_of(report);
  EXPECT_THAT(page, Says("<h1>small-1b on 8 ranks</h1>", "<b>none</b>", "memory of a rank: fits",
                         "7.17 GiB", "80.0 GiB (memory of h100)", "200 ms", "pp 1 x dp_shard 8",
                         "gradients are rounded", "contracts of 3 ranks"));
  report.memory = 6 * kGiB;
  report.findings.push_back({.kind = FindingKind::kGradient,
                             .operation = "all_reduce of leave",
                             .unit = "model.layers.0",
                             .parameter = "model.layers.0.mlp.gate_proj.weight",
                             .axis = "tp",
                             .found = "twice <1.0>",
                             .expected = "1.0",
                             .mend = "sum it once"});
  page = page_of(report);
  EXPECT_THAT(page, Says("does not fit", "<code>model.layers.0.mlp.gate_proj.weight</code>",
                         "all_reduce of leave", "<dd>model.layers.0</dd>", "<dd>tp</dd>",
                         "twice &lt;1.0&gt;", "<dd>1.0</dd>", "sum it once"));
}

// A report without places, passes or anything sent has fewer pictures and is a page.
TEST(Page, LeavesOutWhatIsNotKnown) {
  Report report = report_of(0);
  report.time.reset();
  EXPECT_EQ(count(page_of(report), "<svg"), 0);
  report.places = {Place{}};
  report.knows_tokens = false;
  EXPECT_THAT(page_of(report), Says("training.seq_len", "A rank sends nothing."));
}

TEST(Page, EveryPictureHasARoleAndATitleOfItsOwn) {
  Report report = report_of(4);
  report.schedule = drawn_schedule(4, 8);
  const std::string page = page_of(report);
  EXPECT_EQ(count(page, "role=\"img\" aria-labelledby="), 8) << "held, 4 steps, sent, time, slots";
  for (const char* id : {"held", "step0", "step1", "step2", "step3", "sent", "time", "slots"}) {
    EXPECT_EQ(count(page, concat("aria-labelledby=\"", id, "\"><title id=\"", id, "\">")), 1) << id;
  }
}

TEST(Page, OfManyPlacesThreeAreShown) {
  Report report = report_of(9);
  report.places[5].peak *= 2;
  const std::string page = page_of(report);
  EXPECT_THAT(page,
              Says("Of 9 places of the pipeline", "id=\"step0\"", "id=\"step5\"", "id=\"step8\""));
  EXPECT_EQ(count(page, "id=\"step"), 3);
  report.places.back().peak *= 4;
  EXPECT_EQ(count(page_of(report), "id=\"step"), 2) << "the last one needs most";
}

// 200 layers of three units, in 8 places with 64 micro-batches each: what is left out is said.
TEST(Page, StaysSmallForALargeRun) {
  Report report = report_of(8, 600, 16);
  report.schedule = drawn_schedule(16, 128);
  for (int i = 0; i < 1000; ++i) {
    report.findings.push_back({.parameter = concat("model.layers.", i, ".weight"),
                               .found = std::string(2000, '"'),
                               .expected = std::string(2000, '&'),
                               .mend = std::string(2000, '<')});
  }
  const std::string page = page_of(report);
  EXPECT_LE(page.size(), 500'000U);
  EXPECT_THAT(page, Says("first 50 of 1000", "passes are one column", "that need most"));
}

// A forward keeps 1, 2, 3, 4 units of memory, then they go; the root's work is a column of its own,
// where the most is: behind the layers in a forward, before them in a backward.
TEST(StepMemory, DrawsUnitsInTheOrderOfTheStep) {
  const std::string picture = step_memory(report_of(1));
  const std::int64_t unit = kGiB / 64;
  std::vector<std::string> titles;
  for (auto at = picture.find("height=\"1000\"><title>"); at != std::string::npos;
       at = picture.find("height=\"1000\"><title>", at + 1)) {
    const auto begin = picture.find("<title>", at) + 7;
    titles.push_back(picture.substr(begin, picture.find("</title>", begin) - begin));
  }
  ASSERT_EQ(titles.size(), 10U);
  const auto size = [&](int units) { return concat("+", size_text(units * unit)); };
  EXPECT_EQ(titles[0],
            concat("forward of model.layers.0: ", size(0), " to ", size(1), ", at most ", size(3)));
  EXPECT_EQ(titles[4],
            concat("forward of (root): ", size(4), " to ", size(4), ", at most ", size(9)));
  EXPECT_EQ(titles[5],
            concat("backward of (root): ", size(4), " to ", size(4), ", at most ", size(11)));
  EXPECT_EQ(titles[6], concat("backward of model.layers.3: ", size(4), " to ", size(3),
                              ", at most ", size(8)));
  EXPECT_THAT(picture, Says("7.00 GiB always held, at most 7.17 GiB, in the backward of (root)"));
}

// The line of the memory that a rank has is in the picture where it is near, else in words.
TEST(StepMemory, DrawsTheMemoryOfARank) {
  Report report = report_of(1);
  EXPECT_EQ(count(step_memory(report), "class=\"limit\""), 0);
  report.memory = 7 * kGiB + kGiB / 8;
  EXPECT_EQ(count(step_memory(report), "class=\"limit\""), 1);
  report.memory = 80 * kGiB;
  EXPECT_THAT(step_memory(report), Says("80.0 GiB, is beyond the top"));
  report.memory = 5 * kGiB;
  EXPECT_THAT(step_memory(report), Says("always held is more than the memory of a rank, 5.00 GiB"));
}

TEST(SchedulePicture, HasEverySlotOfEveryKind) {
  for (const pipeline::KindRow& row : pipeline::kinds()) {
    const auto schedule = make_schedule(row.kind, {2, row.stages_per_rank, 6});
    const pipeline::Costs costs(static_cast<std::size_t>(schedule.stages()));
    const std::string picture = schedule_picture(to_svg(schedule, simulate(schedule, costs)));
    int actions = 0;
    for (const auto& list : schedule.slots) {
      for (const pipeline::Slot& slot : list) {
        slot.each([&](const pipeline::Action&) { ++actions; });
        EXPECT_THAT(picture, Says("<title>" + to_string(slot) + ", ")) << row.name;
      }
    }
    EXPECT_EQ(count(picture, "</title></rect>"), actions) << row.name;
    EXPECT_THAT(picture, Says("rank 0", "rank 1", "forward"));
  }
}

TEST(SchedulePicture, OfManySlotsHasBoxesAloneAndOfTooManyIsNone) {
  const std::string squeezed = schedule_picture(drawn_schedule(8, 64));
  EXPECT_EQ(count(squeezed, "h-"), 8 * 64 * 2) << "a box a forward and a backward";
  EXPECT_LE(squeezed.size(), 40'000U);
  EXPECT_THAT(schedule_picture(drawn_schedule(32, 128)),
              Says("8,192 boxes, more than this page holds"));
}

// Nothing is copied: another text than that of to_svg() gives a sentence.
TEST(SchedulePicture, TakesNothingElseOver) {
  const std::string good = drawn_schedule(2, 2);
  const auto changed = [&](const std::string& from, const std::string& to) {
    std::string text = good;
    return schedule_picture(text.replace(text.find(from), from.size(), to));
  };
  for (const auto& bad :
       {changed("</svg>", "<script>x</script></svg>"), changed("<g>", "<image href=\"x\"/><g>"),
        changed("<g>", "<a href=\"x\"><g>"), changed("fill=\"#a9c8f5\"", "fill=\"url(http://x)\""),
        changed("<title>", "<title><b>"), changed("x=\"76\"", "x=\"1e99\""), schedule_picture(""),
        schedule_picture("<svg width=\"1\">")}) {
    EXPECT_EQ(bad, "<p>The picture of the schedule cannot be read.</p>\n");
  }
  EXPECT_THAT(changed("rank 0", "&\"'"), Says("&amp;&quot;&#39;"));
}

TEST(Markup, EscapesCutsAndShowsWhatXmlDoesNotAllow) {
  EXPECT_EQ(escaped("a<b>&\"'c"), "a&lt;b&gt;&amp;&quot;&#39;c");
  EXPECT_EQ(escaped("a\nb\tc"), "a b c");
  EXPECT_EQ(escaped(std::string("\0\x1b\xff", 3)), "\\x00\\x1b\\xff");
  EXPECT_EQ(escaped("\xef\xbf\xbf\u202e"), "\\xef\\xbf\\xbf\\xe2\\x80\\xae");
  EXPECT_EQ(escaped("\xe2\x82<"), "\\xe2\\x82&lt;") << "a character that a mark breaks off";
  EXPECT_EQ(escaped("\u00e4\u4e2d"), "\u00e4\u4e2d");
  EXPECT_EQ(escaped("abcdef", 4), "abcd\u2026");
  EXPECT_EQ(escaped("abc&", 5), "abc\u2026") << "an entity is whole or not there";
}

TEST(Markup, NumbersAreAsPeopleReadThem) {
  EXPECT_EQ(grouped(0), "0");
  EXPECT_EQ(grouped(-1234), "-1,234");
  EXPECT_EQ(grouped(19702532500), "19,702,532,500");
  EXPECT_EQ(time_text(3707.1), "3.71 s");
  EXPECT_EQ(time_text(NAN), "unknown");
  EXPECT_EQ(percent(0.43214), "43.21%");
  EXPECT_EQ(percent(7.0), "100%");
  EXPECT_EQ(coordinate(1.50), "1.5");
  EXPECT_EQ(coordinate(INFINITY), "0");
}

}  // namespace
}  // namespace tessera::check::page_test
