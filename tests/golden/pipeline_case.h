// One pipeline with other axes: what tests of pipelines vary.
#pragma once

#include <string>
#include <vector>

#include "golden/degrees.h"
#include "tessera/error.h"
#include "train/config/config.h"

namespace tessera::golden {

struct PipelineCase {
  std::string folder;
  std::string schedule;
  int stages = 2;        ///< ranks of axis pp
  Degrees degrees = {};  ///< of the other axes
  bool bfloat16 = false;
  RecomputeMode recompute = RecomputeMode::kNone;
  train::PipelineReshard reshard = train::PipelineReshard::kStep;
};

inline std::string to_string(const PipelineCase& c) {
  constexpr const char* kRecomputed[] = {"nothing", "layers", "all but weight products"};
  return concat(c.folder, ", ", c.schedule, " of ", c.stages, " ranks, ", to_string(c.degrees),
                c.bfloat16 ? ", bf16" : ", fp32", ", ", kRecomputed[static_cast<int>(c.recompute)],
                " recomputed, ",
                c.reshard == train::PipelineReshard::kStep ? "kept in the step"
                                                           : "gathered for each micro-batch");
}

inline const std::vector<std::string> kKinds{
    "GPipe", "1F1B",      "Interleaved1F1B", "ZB1P", "InterleavedZeroBubble",
    "ZBV",   "DualPipeV", "Paired1F1B"};
inline constexpr int kRanks[] = {2, 4};
inline constexpr RecomputeMode kModes[] = {RecomputeMode::kNone, RecomputeMode::kFull,
                                           RecomputeMode::kSelective};
inline constexpr train::PipelineReshard kReshard[] = {train::PipelineReshard::kStep,
                                                      train::PipelineReshard::kMicroBatch};
inline bool has_several_stages(const std::string& kind) {
  return kind != "GPipe" && kind != "1F1B" && kind != "ZB1P" && kind != "Paired1F1B";
}

inline Layout with_stages(const Layout& layout, int stages) {
  auto all = layout;
  all.ranks *= stages;
  return all;
}

}  // namespace tessera::golden
