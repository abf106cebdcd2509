// A plan of a step as a file, with the run that it was made for.
//
// JSON, numbers as numbers, an action as ["gather", 3]. A file is untrusted input: parse_plan()
// refuses what is no plan, with file and place, before anything is made of it; faults_of()
// (fsdp/agreed/step_plan_check.h) finds out whether it holds, require_made_for() whether it is a
// plan of this run. Pure. Next: plan_diff.h, plan_text.h.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>

#include "base/text/fields.h"
#include "fsdp/agreed/step_plan.h"

namespace tessera::capture {

/// The run that a plan was made for: it is of no use to another one.
struct MadeFor {
  std::string model = {};  ///< the hash of its bucket plan (layout::hash), in decimal
  std::int64_t world = 1;
  std::string torch = {};  ///< TORCH_VERSION
  std::int64_t micro_batches = 1;
  std::int64_t tokens = 0;   ///< of a micro-batch on a rank; 0: unknown
  std::string context = {};  ///< "gather over 2 ranks, 4 parts"; empty: rows are not cut
  bool operator==(const MadeFor&) const = default;
};

template <class V>
constexpr void fields(V& visit, Of<MadeFor>) {
  visit("model", &MadeFor::model, TextLimit{256, Letters::kPrintable});
  visit("world", &MadeFor::world, IntRange{1, std::int64_t{1} << 31});
  visit("torch", &MadeFor::torch, TextLimit{256, Letters::kPrintable});
  visit("micro_batches", &MadeFor::micro_batches, IntRange{1, std::int64_t{1} << 31});
  visit("tokens", &MadeFor::tokens, IntRange{0, std::int64_t{1} << 46});
  visit({"context", Missing::kLeftOut}, &MadeFor::context, TextLimit{256, Letters::kPrintable});
}

struct PlanFile {
  MadeFor made_for = {};
  std::optional<std::int64_t> memory_budget = {};  ///< bytes of gathered memory and activations
  fsdp::StepPlan plan = {};
  bool operator==(const PlanFile&) const = default;
};

template <class V>
constexpr void fields(V& visit, Of<PlanFile>) {
  visit("made_for", &PlanFile::made_for);
  visit({"memory_budget", Missing::kNull}, &PlanFile::memory_budget,
        IntRange{0, std::numeric_limits<std::int64_t>::max()});
  visit("", &PlanFile::plan);  // its fields stand among these
}

/// The most bytes of a plan file.
inline constexpr std::int64_t kMostPlanBytes = std::int64_t{64} << 20;

/// Writes a file; equal files give equal bytes.
std::string to_json(const PlanFile& file);
/// `where` names the file in messages. Errors: kFormat with file and place for what is no plan:
/// truncated, of another version, larger than any model's, numbers that name no unit.
PlanFile parse_plan(std::string_view text, std::string_view where);

/// Errors: kConfig naming what differs, with both values.
void require_made_for(const PlanFile& file, const MadeFor& run, std::string_view where);
/// Checks that it is a plan of these units and of this record of them. Errors: kConfig naming the
/// first unit or entry that differs.
void require_plan_of(const fsdp::StepPlan& plan, const fsdp::StepRecord& record,
                     const std::vector<fsdp::PlanUnit>& units, std::string_view where);
/// Checks that faults_of() finds none. Errors: kConfig with the first.
void require_sound(const fsdp::StepPlan& plan, std::optional<std::int64_t> budget,
                   std::string_view where);

}  // namespace tessera::capture
