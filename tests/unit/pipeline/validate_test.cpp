// A program that can run validates, and each kind of mistake is found by name.
#include "pipeline/validate.h"

#include <tuple>

#include "pipeline/kinds.h"
#include "support/test.h"
#include "unit/pipeline/random_schedule.h"

namespace tessera::pipeline::validate_test {
namespace {

using testing::Dice;
using testing::MicroBatchOrder;
using testing::random_schedule;

std::string text_of(const Validation& validation) {
  std::string text;
  for (const Finding& finding : validation.findings) {
    text += concat(to_string(finding.fault), ": ", finding.text, '\n');
  }
  return text;
}

bool found(const Validation& validation, Fault fault) {
  return std::ranges::any_of(validation.findings,
                             [&](const Finding& finding) { return finding.fault == fault; });
}

/// Every shape that a kind takes, of up to `most_ranks` ranks.
template <class Visit>
void each_schedule(int most_ranks, const Visit& visit) {
  for (const KindRow& row : kinds()) {
    for (int ranks = 1; ranks <= most_ranks; ++ranks) {
      for (const int stages :
           row.any_stages ? std::vector<int>{1, 2, 3, 4} : std::vector<int>{row.stages_per_rank}) {
        for (int micro_batches = 1; micro_batches <= 3 * ranks * stages; ++micro_batches) {
          const Shape shape{ranks, stages, micro_batches};
          try {
            visit(row, shape, make_schedule(row.kind, shape));
          } catch (const Error& error) {
            ASSERT_EQ(error.kind(), ErrorKind::kConfig) << error.what();
          }
        }
      }
    }
  }
}

TEST(Validate, EveryKindIsValidAndInOrder) {
  int schedules = 0;
  each_schedule(4, [&](const KindRow& row, const Shape& shape, const Schedule& schedule) {
    const Validation validation = validate(schedule);
    EXPECT_EQ(text_of(validation), "")
        << row.name << ' ' << shape.ranks << ' ' << shape.micro_batches;
    EXPECT_THAT(validation.remarks, IsEmpty()) << row.name;
    ++schedules;
  });
  EXPECT_GT(schedules, 400);
}

/// The papers' peaks: all; as many as stages follow; those of the stages, one more.
std::optional<int> peak_of_paper(Kind kind, const Shape& shape, int rank) {
  switch (kind) {
    case Kind::kGPipe:
      return shape.micro_batches;
    case Kind::kOneFOneB:
      return shape.ranks - rank;
    case Kind::kZeroBubble:
      return shape.ranks;
    case Kind::kZeroBubbleV:
      return 2 * shape.ranks;
    case Kind::kDualPipeV:
      return 2 * shape.ranks + 1;
    case Kind::kPairedOneFOneB:
      return std::min(shape.micro_batches, 2 * (shape.ranks - rank));
    default:
      return std::nullopt;
  }
}

TEST(Validate, KindsKeepToTheMemoryOfTheirPapers) {
  each_schedule(4, [&](const KindRow& row, const Shape& shape, const Schedule& schedule) {
    if (shape.micro_batches < 2 * shape.ranks) return;
    const std::vector<int> peaks = peak_live_chunks(schedule);
    for (int rank = 0; rank < shape.ranks; ++rank) {
      const int peak = peaks[static_cast<std::size_t>(rank)];
      EXPECT_EQ(peak_of_paper(row.kind, shape, rank).value_or(peak), peak)
          << row.name << ' ' << shape.ranks << " rank " << rank;
    }
    const int most = std::ranges::max(peaks);
    EXPECT_TRUE(validate(schedule, {.live_chunks = most}).valid());
    const Validation above = validate(schedule, {.live_chunks = most - 1});
    EXPECT_TRUE(found(above, Fault::kMemory)) << row.name;
  });
}

// With any number of micro-batches, and on a rank alone too.
TEST(Validate, Paired1F1BTakesEveryShape) {
  for (int ranks = 1; ranks <= 8; ++ranks) {
    for (int micro_batches = 1; micro_batches <= 20; ++micro_batches) {
      const Schedule schedule = make_schedule(Kind::kPairedOneFOneB, {ranks, 1, micro_batches});
      const Validation validation =
          validate(schedule, {.messages = MessageOrder::kOfSends, .open_sends = 0});
      EXPECT_EQ(text_of(validation), "") << ranks << " ranks, " << micro_batches;
      EXPECT_THAT(validation.remarks, IsEmpty());
      const std::vector<int> peaks = peak_live_chunks(schedule);
      for (int rank = 0; rank < ranks; ++rank) {
        EXPECT_EQ(peaks[static_cast<std::size_t>(rank)],
                  std::min(micro_batches, 2 * (ranks - rank)));
      }
    }
  }
}

TEST(Validate, RandomSchedulesAreValid) {
  int messages = 0;
  for (std::uint64_t seed = 1; seed <= 2000; ++seed) {
    Dice dice(seed);
    const auto order = dice.chance(50) ? MicroBatchOrder::kKept : MicroBatchOrder::kAny;
    const Schedule schedule = random_schedule(dice, order);
    const Validation validation = validate(schedule);
    ASSERT_EQ(text_of(validation), "") << "seed " << seed << '\n' << to_string(schedule);
    if (order == MicroBatchOrder::kKept) {
      EXPECT_THAT(validation.remarks, IsEmpty()) << "seed " << seed;
    }
    // Any number of receives ahead gives a program that is valid, too.
    const Program program = lower(schedule, dice.roll(4));
    ASSERT_EQ(text_of(validate(program)), "") << "seed " << seed;
    EXPECT_EQ(schedule_of(program), schedule);
    for (const auto& steps : program.steps) {
      messages += static_cast<int>(std::ranges::count_if(
          steps, [](const Step& step) { return std::holds_alternative<Transfer>(step); }));
    }
  }
  EXPECT_GT(messages, 20000);
}

/// Another way to say whether lists can run: the graph of all slots has no circle.
bool has_an_order(const Schedule& schedule) {
  std::vector<std::vector<std::size_t>> after;  // of each slot, over all ranks
  std::vector<int> waits_for;
  std::map<Action, std::size_t> number;
  for (const auto& slots : schedule.slots) {
    for (const Slot& slot : slots) {
      slot.each([&](const Action& action) { number[action] = after.size(); });
      after.emplace_back();
      waits_for.push_back(0);
    }
  }
  const auto edge = [&](std::size_t from, std::size_t to) {
    after[from].push_back(to);
    ++waits_for[to];
  };
  std::size_t at = 0;
  for (const auto& slots : schedule.slots) {
    for (std::size_t i = 0; i < slots.size(); ++i, ++at) {
      if (i > 0) edge(at - 1, at);
      slots[i].each([&](const Action& action) {
        std::vector<Action> needs;
        const int s = action.stage;
        const int k = action.micro_batch;
        if (action.kind == ActionKind::kForward && s > 0)
          needs = {{ActionKind::kForward, s - 1, k}};
        if (action.kind == ActionKind::kWeightGradient)
          needs = {{ActionKind::kInputGradient, s, k}};
        if (action.gives_input_gradient()) {
          needs = {{ActionKind::kForward, s, k},
                   {ActionKind::kBackward, s + 1, k},
                   {ActionKind::kInputGradient, s + 1, k}};
        }
        for (const Action& need : needs) {
          if (const auto from = number.find(need); from != number.end()) edge(from->second, at);
        }
      });
    }
  }
  std::vector<std::size_t> free;
  for (std::size_t i = 0; i < after.size(); ++i) {
    if (waits_for[i] == 0) free.push_back(i);
  }
  std::size_t taken = 0;
  for (; !free.empty(); ++taken) {
    const std::size_t one = free.back();
    free.pop_back();
    for (const std::size_t next : after[one]) {
      if (--waits_for[next] == 0) free.push_back(next);
    }
  }
  return taken == after.size();
}

// A slot that is put elsewhere in its list: valid where the graph of all slots has an order, and
// only there.
TEST(Validate, AgreesWithTheGraphOfAllSlots) {
  int valid = 0;
  int dependencies = 0;
  int deadlocks = 0;
  for (std::uint64_t seed = 1; seed <= 3000; ++seed) {
    Dice dice(seed);
    Schedule schedule = random_schedule(dice);
    auto& slots = schedule.slots[static_cast<std::size_t>(dice.roll(schedule.ranks()))];
    const int from = dice.roll(static_cast<int>(slots.size()));
    const Slot moved = slots[static_cast<std::size_t>(from)];
    slots.erase(slots.begin() + from);
    slots.insert(slots.begin() + dice.roll(static_cast<int>(slots.size()) + 1), moved);
    const Validation validation = validate(schedule);
    ASSERT_EQ(validation.valid(), has_an_order(schedule))
        << "seed " << seed << '\n'
        << to_string(schedule) << text_of(validation);
    valid += validation.valid();
    dependencies += found(validation, Fault::kDependency);
    deadlocks += found(validation, Fault::kDeadlock);
  }
  EXPECT_GT(valid, 300);
  EXPECT_GT(dependencies, 300);
  EXPECT_GT(deadlocks, 100);
}

std::vector<Slot>& any_list(Schedule& schedule, Dice& dice) {
  return schedule.slots[static_cast<std::size_t>(dice.roll(schedule.ranks()))];
}
Slot& any_slot(Schedule& schedule, Dice& dice) {
  auto& slots = any_list(schedule, dice);
  return slots[static_cast<std::size_t>(dice.roll(static_cast<int>(slots.size())))];
}

struct Mistake {
  const char* name;
  Fault fault;
  /// False where this schedule has no place for it.
  std::function<bool(Schedule&, Dice&)> make;
};

const std::vector<Mistake>& mistakes() {
  static const std::vector<Mistake> all{
      {"an action dropped", Fault::kMissing,
       [](Schedule& schedule, Dice& dice) {
         Slot& slot = any_slot(schedule, dice);
         if (slot.paired) {
           slot.paired.reset();
           return true;
         }
         for (auto& slots : schedule.slots) std::erase(slots, slot);
         return true;
       }},
      {"W dropped", Fault::kMissing,
       [](Schedule& schedule, Dice& dice) {
         auto& slots = any_list(schedule, dice);
         return std::erase_if(slots, [](const Slot& slot) {
                  return slot.action.kind == ActionKind::kWeightGradient;
                }) > 0;
       }},
      {"an action twice", Fault::kRepeated,
       [](Schedule& schedule, Dice& dice) {
         auto& slots = any_list(schedule, dice);
         slots.push_back(
             {slots[static_cast<std::size_t>(dice.roll(static_cast<int>(slots.size())))].action,
              {}});
         return true;
       }},
      {"W in addition to B", Fault::kRepeated,
       [](Schedule& schedule, Dice& dice) {
         auto& slots = any_list(schedule, dice);
         const auto whole = std::ranges::find_if(
             slots, [](const Slot& slot) { return slot.action.kind == ActionKind::kBackward; });
         if (whole == slots.end()) return false;
         Action weight = whole->action;
         weight.kind = ActionKind::kWeightGradient;
         slots.push_back({weight, {}});
         return true;
       }},
      {"W of another micro-batch", Fault::kRepeated,
       [](Schedule& schedule, Dice& dice) {
         for (Slot& slot : any_list(schedule, dice)) {
           if (slot.action.kind != ActionKind::kWeightGradient || schedule.micro_batches < 2)
             continue;
           slot.action.micro_batch = (slot.action.micro_batch + 1) % schedule.micro_batches;
           return true;
         }
         return false;
       }},
      {"a micro-batch too high", Fault::kUnknown,
       [](Schedule& schedule, Dice& dice) {
         any_slot(schedule, dice).action.micro_batch = schedule.micro_batches;
         return true;
       }},
      {"a stage too high", Fault::kUnknown,
       [](Schedule& schedule, Dice& dice) {
         any_slot(schedule, dice).action.stage = schedule.stages();
         return true;
       }},
      {"an action on another rank", Fault::kPlacement,
       [](Schedule& schedule, Dice& dice) {
         if (schedule.ranks() < 2) return false;
         schedule.slots[0].push_back(schedule.slots[1].back());
         schedule.slots[1].pop_back();
         (void)dice;
         return true;
       }},
      {"I before F", Fault::kDependency,
       [](Schedule& schedule, Dice& dice) {
         auto& slots = any_list(schedule, dice);
         const auto backward = std::ranges::find_if(
             slots, [](const Slot& slot) { return slot.action.gives_input_gradient(); });
         if (backward == slots.end()) return false;
         std::rotate(slots.begin(), backward, backward + 1);
         return true;
       }},
      {"W before I", Fault::kDependency,
       [](Schedule& schedule, Dice& dice) {
         auto& slots = any_list(schedule, dice);
         const auto weight = std::ranges::find_if(slots, [](const Slot& slot) {
           return slot.action.kind == ActionKind::kWeightGradient;
         });
         if (weight == slots.end()) return false;
         std::rotate(slots.begin(), weight, weight + 1);
         return true;
       }},
      {"two F side by side", Fault::kPair,
       [](Schedule& schedule, Dice& dice) {
         for (Slot& slot : any_list(schedule, dice)) {
           if (!slot.paired) continue;
           slot.paired->kind = ActionKind::kForward;
           return true;
         }
         return false;
       }},
      {"B paired with its own F", Fault::kDependency,
       [](Schedule& schedule, Dice& dice) {
         auto& slots = any_list(schedule, dice);
         for (std::size_t i = 0; i + 1 < slots.size(); ++i) {
           Slot& slot = slots[i];
           const Action backward{ActionKind::kBackward, slot.action.stage, slot.action.micro_batch};
           if (slot.paired || slots[i + 1] != Slot{backward, {}}) continue;
           slot.paired = backward;
           slots.erase(slots.begin() + static_cast<std::ptrdiff_t>(i) + 1);
           return true;
         }
         return false;
       }},
  };
  return all;
}

TEST(Validate, FindsEachMistakeInALists) {
  for (const Mistake& mistake : mistakes()) {
    int made = 0;
    for (std::uint64_t seed = 1; seed <= 400; ++seed) {
      Dice dice(seed);
      Schedule schedule = random_schedule(dice);
      const std::string before = to_string(schedule);
      if (!mistake.make(schedule, dice)) continue;
      ++made;
      const Validation validation = validate(schedule);
      EXPECT_TRUE(found(validation, mistake.fault))
          << mistake.name << ", seed " << seed << '\n'
          << before << to_string(schedule) << text_of(validation);
    }
    EXPECT_GT(made, 30) << mistake.name;
  }
}

/// One step of a kind taken out of a program, or none where it has no such step.
std::optional<Step> take_transfer(Program& program, Transfer::End end, Dice& dice) {
  std::vector<std::pair<std::size_t, std::size_t>> places;
  for (std::size_t rank = 0; rank < program.steps.size(); ++rank) {
    for (std::size_t i = 0; i < program.steps[rank].size(); ++i) {
      const auto* transfer = std::get_if<Transfer>(&program.steps[rank][i]);
      if (transfer != nullptr && transfer->end == end) places.emplace_back(rank, i);
    }
  }
  if (places.empty()) return std::nullopt;
  const auto [rank, i] = dice.pick(places);
  auto& steps = program.steps[rank];
  Step taken = steps[i];
  steps.erase(steps.begin() + static_cast<std::ptrdiff_t>(i));
  return taken;
}

TEST(Validate, FindsEachMistakeInMessages) {
  int made = 0;
  for (std::uint64_t seed = 1; seed <= 300; ++seed) {
    Dice dice(seed);
    const Program program = lower(random_schedule(dice));
    const auto expect_found = [&](const Program& broken, const char* what) {
      EXPECT_TRUE(found(validate(broken), Fault::kMessage)) << what << ", seed " << seed;
      ++made;
    };
    for (const auto end : {Transfer::End::kSend, Transfer::End::kReceive}) {
      Program dropped = program;
      const auto step = take_transfer(dropped, end, dice);
      if (!step) continue;
      expect_found(dropped, "dropped");
      const auto rank = static_cast<std::size_t>(
          program.rank_of[static_cast<std::size_t>(std::get<Transfer>(*step).stage())]);
      Program twice = program;
      twice.steps[rank].push_back(*step);
      expect_found(twice, "twice");
      Program elsewhere = dropped;
      elsewhere.steps[(rank + 1) % elsewhere.steps.size()].push_back(*step);
      expect_found(elsewhere, "on another rank");
      Program moved = dropped;  // a send to the beginning, a receive to the end
      auto& steps = moved.steps[rank];
      steps.insert(end == Transfer::End::kSend ? steps.begin() : steps.end(), *step);
      expect_found(moved, "too early or late");
      Program other = dropped;
      Transfer wrong = std::get<Transfer>(*step);
      wrong.what.micro_batch = program.micro_batches;
      other.steps[rank].push_back(wrong);
      expect_found(other, "of another micro-batch");
    }
  }
  EXPECT_GT(made, 1500);
}

// Rank 1 begins with the micro-batch that rank 0 sends last: whether that ends depends on how many
// sends may wait.
TEST(Validate, ADeadlockNamesTheCircle) {
  Schedule schedule = make_schedule(Kind::kGPipe, {2, 1, 4});
  std::ranges::reverse(schedule.slots[1].begin(), schedule.slots[1].begin() + 4);
  EXPECT_EQ(text_of(validate(schedule)), "");
  EXPECT_EQ(fewest_open_sends(lower(schedule)), 2);
  EXPECT_TRUE(validate(schedule, {.open_sends = 2}).valid());
  const Validation blocked = validate(schedule, {.open_sends = 1});
  ASSERT_TRUE(found(blocked, Fault::kDeadlock));
  EXPECT_EQ(
      blocked.findings[0].text,
      "ranks wait for each other: rank 0 after a send waits for the receive of activations of "
      "stage 0, micro-batch 0 to be posted (rank 1); rank 1 before 1F3 waits for activations "
      "of stage 0, micro-batch 3 (rank 0)");
  // And without any sends that wait: each rank begins with what the other makes behind it.
  std::ranges::rotate(schedule.slots[0], schedule.slots[0].begin() + 4);
  const Validation crossed = validate(schedule);
  EXPECT_FALSE(crossed.valid());
}

// With receives a slot ahead the simple kinds run where every send blocks its rank until the
// receive is posted; the others need one or, with stages a rank, a few on the way.
TEST(Validate, KindsEndWithFewOpenSends) {
  std::map<std::string_view, int> most;
  each_schedule(4, [&](const KindRow& row, const Shape&, const Schedule& schedule) {
    most[row.name] = std::max(most[row.name], fewest_open_sends(lower(schedule)));
  });
  EXPECT_EQ(most, (std::map<std::string_view, int>{{"GPipe", 0},
                                                   {"1F1B", 0},
                                                   {"Interleaved1F1B", 1},
                                                   {"ZB1P", 0},
                                                   {"InterleavedZeroBubble", 3},
                                                   {"ZBV", 1},
                                                   {"DualPipeV", 1},
                                                   {"Paired1F1B", 0}}));
}

// Every send of rank 0 is open when rank 1 begins: far above what a walk could do that counts them
// at each step.
TEST(Validate, TakesLongSchedules) {
  constexpr int kMicroBatches = kMostMicroBatches / 4;
  const Schedule schedule = make_schedule(Kind::kGPipe, {2, 1, kMicroBatches});
  EXPECT_TRUE(validate(schedule).valid());
  EXPECT_EQ(fewest_open_sends(lower(schedule)), 0);
  Schedule reversed = schedule;
  std::ranges::reverse(reversed.slots[1].begin(), reversed.slots[1].begin() + kMicroBatches);
  // Rank 1 begins with the last and has two receives posted before it.
  EXPECT_EQ(fewest_open_sends(lower(reversed)), kMicroBatches - 2);
}

TEST(Validate, StopsToCollectFindings) {
  Schedule schedule = make_schedule(Kind::kGPipe, {1, 1, 1});
  schedule.slots[0].resize(1002, schedule.slots[0][0]);  // F and B, then F again
  const Validation validation = validate(schedule);
  EXPECT_EQ(validation.findings.size(), Validation::kMostFindings);
  EXPECT_EQ(validation.more, 900);
  const Validation all = validate(schedule, {.findings = 5000});
  EXPECT_EQ(all.findings.size(), 1000);
  EXPECT_EQ(all.more, 0);
  Schedule holes = make_schedule(Kind::kGPipe, {1, 1, 100});
  std::erase_if(holes.slots[0], [](const Slot& slot) { return slot.action.micro_batch % 2 == 1; });
  EXPECT_THAT(text_of(validate(holes)), Says("micro-batch 1, 3, 5,"));
  EXPECT_THAT(text_of(validate(holes)), Says(", 39 and 30 more, expected one of each"));
}

/// Messages of a direction from one rank to another, in the order of one end.
std::map<std::tuple<int, int, Direction>, std::vector<HandOver>> messages_of(const Program& program,
                                                                             Transfer::End end) {
  std::map<std::tuple<int, int, Direction>, std::vector<HandOver>> messages;
  for (const auto& steps : program.steps) {
    for (const Step& step : steps) {
      const auto* transfer = std::get_if<Transfer>(&step);
      if (transfer == nullptr || transfer->end != end) continue;
      const HandOver& what = transfer->what;
      const int from = program.rank_of[static_cast<std::size_t>(what.from)];
      const int to = program.rank_of[static_cast<std::size_t>(what.to())];
      messages[{from, to, what.direction}].push_back(what);
    }
  }
  return messages;
}

// A transport without tags can run every kind: in each direction messages are received in the order
// in which they are sent.
TEST(Validate, MessagesOfKindsDoNotOvertake) {
  int pairs = 0;
  each_schedule(4, [&](const KindRow& row, const Shape& shape, const Schedule& schedule) {
    const Program program = lower(schedule);
    const auto sent = messages_of(program, Transfer::End::kSend);
    EXPECT_EQ(sent, messages_of(program, Transfer::End::kReceive))
        << row.name << ' ' << shape.ranks << ' ' << shape.micro_batches;
    pairs += static_cast<int>(sent.size());
    EXPECT_TRUE(validate(schedule, {.messages = MessageOrder::kOfSends}).valid());
  });
  EXPECT_GT(pairs, 1000);
}

TEST(Validate, MessagesThatOvertakeAreFoundWhereTheirOrderCounts) {
  const Limits in_order{.messages = MessageOrder::kOfSends};
  int overtaken = 0;
  constexpr int kSeeds = 300;
  for (std::uint64_t seed = 1; seed <= kSeeds; ++seed) {
    Dice dice(seed);
    const Program program = lower(random_schedule(dice, MicroBatchOrder::kAny));
    EXPECT_TRUE(validate(program).valid());
    const bool overtakes =
        messages_of(program, Transfer::End::kSend) != messages_of(program, Transfer::End::kReceive);
    const Validation validation = validate(program, in_order);
    EXPECT_EQ(found(validation, Fault::kMessage), overtakes) << "seed " << seed;
    EXPECT_EQ(validation.valid(), !overtakes) << text_of(validation);
    overtaken += overtakes ? 1 : 0;
  }
  EXPECT_GT(overtaken, kSeeds / 10);
  EXPECT_LT(overtaken, kSeeds);
  Schedule schedule = make_schedule(Kind::kGPipe, {2, 1, 2});
  std::swap(schedule.slots[1][0], schedule.slots[1][1]);
  EXPECT_EQ(text_of(validate(schedule, in_order)),
            "message: rank 1: found the receive of activations of stage 0, micro-batch 1 where "
            "rank 0 sends activations of stage 0, micro-batch 0, expected receives in the order "
            "of the sends\n");
}

TEST(Validate, ReportsStagesThatLeaveTheOrder) {
  Schedule schedule = make_schedule(Kind::kZeroBubble, {2, 1, 4});
  // Rank 1 ends 1W2 1W3.
  std::swap(schedule.slots[1][schedule.slots[1].size() - 2], schedule.slots[1].back());
  const Validation weights = validate(schedule);
  EXPECT_TRUE(weights.valid());
  ASSERT_EQ(weights.remarks.size(), 1U);
  EXPECT_THAT(weights.remarks[0],
              Says("stage 1: weight gradients leave the order of micro-batches: 1W2 comes "
                   "after 1W3"));
  Schedule gpipe = make_schedule(Kind::kGPipe, {1, 1, 3});
  std::ranges::reverse(gpipe.slots[0].begin() + 3, gpipe.slots[0].end());
  EXPECT_EQ(validate(gpipe).remarks.size(), 2U) << "a B is both";
}

// The F of a valid schedule can run alone, and nothing else counts as that.
TEST(Validate, ForwardsAloneAreValid) {
  const Limits forward{.passes = Passes::kForward};
  for (std::uint64_t seed = 1; seed <= 300; ++seed) {
    Dice dice(seed);
    const Schedule schedule = random_schedule(dice, MicroBatchOrder::kAny);
    Schedule forwards = forward_only(schedule);
    EXPECT_EQ(text_of(validate(forwards, forward)), "") << "seed " << seed;
    EXPECT_TRUE(found(validate(forwards), Fault::kMissing));
    EXPECT_TRUE(found(validate(schedule, forward), Fault::kUnknown));
    any_list(forwards, dice).pop_back();
    EXPECT_TRUE(found(validate(forwards, forward), Fault::kMissing));
  }
}

// Forwards of any number of micro-batches on any stages run, in the order of the micro-batches.
TEST(Validate, ForwardsOfOtherBatchesAreValid) {
  const Limits forward{.passes = Passes::kForward};
  for (std::uint64_t seed = 1; seed <= 100; ++seed) {
    Dice dice(seed);
    const Schedule schedule = random_schedule(dice, MicroBatchOrder::kAny);
    for (const int micro_batches : {1, 2, 7}) {
      const auto forwards = forward_schedule(schedule.rank_of, schedule.ranks(), micro_batches);
      const Validation validation = validate(forwards, forward);
      EXPECT_EQ(text_of(validation), "") << "seed " << seed;
      EXPECT_TRUE(validation.remarks.empty());
      EXPECT_EQ(forwards.rank_of, schedule.rank_of);
      EXPECT_EQ(forwards.micro_batches, micro_batches);
    }
  }
}

TEST(Validate, NamesWhatIsMissingInRanges) {
  Schedule schedule = make_schedule(Kind::kGPipe, {1, 1, 6});
  std::erase_if(schedule.slots[0], [](const Slot& slot) {
    return slot.action.kind == ActionKind::kBackward && slot.action.micro_batch != 3;
  });
  EXPECT_EQ(text_of(validate(schedule)),
            "missing: stage 0: found no B, nor I and W, of micro-batch 0-2, 4-5, expected one of "
            "each\n");
}

}  // namespace
}  // namespace tessera::pipeline::validate_test
