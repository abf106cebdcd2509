// How choices and actions of a plan are spelt, in files and for people. Pure.
#pragma once

#include <array>
#include <string_view>

#include "fsdp/agreed/step_plan.h"

namespace tessera::capture {

template <class E>
struct Word {
  std::string_view word;
  E value;
};

inline constexpr auto kKeepWords = std::to_array<Word<fsdp::Keep>>({
    {"not", fsdp::Keep::kNot},
    {"backward", fsdp::Keep::kBackward},
    {"update", fsdp::Keep::kUpdate},
});
inline constexpr auto kRecomputeWords = std::to_array<Word<RecomputeMode>>({
    {"none", RecomputeMode::kNone},
    {"selective", RecomputeMode::kSelective},
    {"full", RecomputeMode::kFull},
});
inline constexpr auto kRecomputeByWords = std::to_array<Word<fsdp::RecomputeBy>>({
    {"nobody", fsdp::RecomputeBy::kNobody},
    {"user", fsdp::RecomputeBy::kUser},
    {"plan", fsdp::RecomputeBy::kPlan},
});
inline constexpr auto kReduceWords = std::to_array<Word<fsdp::ReduceAt>>({
    {"every backward", fsdp::ReduceAt::kEveryBackward},
    {"last backward", fsdp::ReduceAt::kLastBackward},
    {"asked", fsdp::ReduceAt::kAsked},
});
inline constexpr auto kOrderWords = std::to_array<Word<fsdp::PlanOrder>>({
    {"one after the other", fsdp::PlanOrder::kOneAfterTheOther},
    {"any", fsdp::PlanOrder::kAny},
});
inline constexpr std::array kActionKinds{
    fsdp::PlanAction::Kind::kGather,       fsdp::PlanAction::Kind::kGatherShared,
    fsdp::PlanAction::Kind::kWait,         fsdp::PlanAction::Kind::kKeepToBackward,
    fsdp::PlanAction::Kind::kKeepToUpdate, fsdp::PlanAction::Kind::kRelease,
    fsdp::PlanAction::Kind::kReduce,       fsdp::PlanAction::Kind::kRecompute,
};
inline constexpr std::array kClasses{fsdp::MicroBatchClass::kOnly, fsdp::MicroBatchClass::kFirst,
                                     fsdp::MicroBatchClass::kMiddle, fsdp::MicroBatchClass::kLast};

template <class Words, class E>
std::string_view word_of(const Words& words, E value) {
  for (const auto& one : words) {
    if (one.value == value) return one.word;
  }
  return "";
}

}  // namespace tessera::capture
