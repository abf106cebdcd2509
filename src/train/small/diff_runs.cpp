#include "train/small/diff_runs.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <numeric>
#include <utility>

#include "base/text/printable.h"
#include "io/safetensors.h"
#include "tessera/error.h"
#include "tessera/model_contract.h"
#include "train/config/config_resolve.h"
#include "train/contract_of_run.h"
#include "train/gradients.h"
#include "train/hf/model_source.h"
#include "train/pipeline/pipeline_plan.h"
#include "train/small/compare_runs.h"
#include "train/small/small_run.h"

namespace tessera::train {
namespace {

using check::Values;

/// A side, run.
struct Ran {
  SmallRun run = {};
  SeenRun seen = {};
  DType dtype = DType::kFloat32;
};

ParallelDims dims_of(const DiffSide& side) {
  return resolve_parallelism(side.config.parallelism, ranks_to_spawn(side.config.parallelism));
}

/// `data_ranks`: whose micro-batches both sides run, as an auxiliary loss is of micro-batches.
Ran run_side(const DiffSide& side, const std::string& batch, std::int64_t data_ranks) {
  TESSERA_CHECK(side.config.lora.dropout == 0.0, ErrorKind::kConfig, "lora.dropout: found ",
                side.config.lora.dropout, " in ", side.name,
                ", expected 0 with --diff: what is drawn follows from a row's place, which "
                "differs by layout");
  const auto source =
      open_as("--model", [&] { return open_model(side.config.model, side.config.lora); });
  std::shared_ptr<const BatchSource> rows = open_as("--batch", [&] {
    return open_gradients_batch(batch, vocabulary_of(source.spec, !source.folder), std::nullopt);
  });
  check_positions(side.config.parallelism, rows->row_tokens());
  Ran ran{.run = run_of_batch(side.config, source, dims_of(side), std::move(rows), data_ranks)};
  ran.dtype = coarsest_dtype(resolve_model(source, side.config, ran.run.dims));
  resolve_pipeline(
      ran.run.config, ran.run.dims, source.spec, source.description,
      {ran.run.micro_batches, ran.run.batch->row_tokens()});  // too few rows are refused
  ran.seen = run_small(ran.run);
  return ran;
}

/// Where the layout parts from one rank, both in float32.
std::vector<check::Finding> findings_of(const Ran& ran, std::string_view side) {
  std::vector<check::Finding> findings;
  if (!ran.seen.refused.empty()) {
    findings.push_back({.kind = check::FindingKind::kRefused, .found = ran.seen.refused});
  } else {
    findings = compare_in_small(in_float32(ran.run)).findings;
  }
  for (check::Finding& finding : findings) finding.found = concat(side, ": ", finding.found);
  return findings;
}

/// One file of gradients.
struct Opened {
  SafetensorsFile file;
  DType dtype;

  Values values(const std::string& name) const {
    const auto bytes = file.bytes(name);
    Values values{file.info(name).shape, std::vector<double>(bytes.size() / sizeof(float))};
    for (std::size_t i = 0; i < values.numbers.size(); ++i) {
      float number = 0;
      std::memcpy(&number, bytes.data() + i * sizeof number, sizeof number);
      values.numbers[i] = number;
    }
    return values;
  }
};

Opened open_file(const std::string& path) {
  SafetensorsFile file(path);
  const auto& metadata = file.header().metadata;
  const auto dtype = metadata.find(std::string(kComputedIn));
  TESSERA_CHECK(dtype != metadata.end(), ErrorKind::kFormat, shown(path), ": found no ",
                kComputedIn,
                " in its metadata, expected a file of tessera gradients --out; write it "
                "again with this version");
  const auto known = parse_dtype(dtype->second);
  TESSERA_CHECK(known, ErrorKind::kFormat, shown(path), ": ", kComputedIn, ": found ",
                printable(dtype->second), ", expected a dtype");
  TESSERA_CHECK(file.header().find("loss") != nullptr, ErrorKind::kFormat, shown(path),
                ": found no loss, expected a file of tessera gradients --out");
  TESSERA_CHECK(std::ranges::any_of(file.header().tensors,
                                    [](const TensorInfo& tensor) {
                                      return tensor.name.starts_with(kGradientPrefix);
                                    }),
                ErrorKind::kFormat, shown(path), ": found no gradient, expected a file of ",
                "tessera gradients --out");
  for (const TensorInfo& tensor : file.header().tensors) {
    TESSERA_CHECK(tensor.dtype == DType::kFloat32 ||
                      (tensor.name != "loss" && !tensor.name.starts_with(kGradientPrefix)),
                  ErrorKind::kFormat, shown(path), ": ", printable(tensor.name), ": found ",
                  to_string(tensor.dtype), ", expected float32");
  }
  return {std::move(file), *known};
}

std::vector<std::string> gradients_in(const Opened& opened) {
  std::vector<std::string> names;
  for (const TensorInfo& tensor : opened.file.header().tensors) {
    if (tensor.name.starts_with(kGradientPrefix)) names.push_back(tensor.name);
  }
  std::ranges::sort(names);
  return names;
}

DType coarser(DType a, DType b) { return check::coarseness(a) >= check::coarseness(b) ? a : b; }

}  // namespace

check::GradientDiff diff_runs(const DiffSide& a, const DiffSide& b, const std::string& batch) {
  const std::int64_t data_ranks = std::lcm(dims_of(a).data_ranks(), dims_of(b).data_ranks());
  const Ran of_a = run_side(a, batch, data_ranks), of_b = run_side(b, batch, data_ranks);
  const SeenStep& step_a = of_a.seen.steps.front();
  const SeenStep& step_b = of_b.seen.steps.front();
  check::GradientDiff diff;
  if (of_a.seen.refused.empty() && of_b.seen.refused.empty()) {
    diff = check::compare_gradients(step_a.gradients, step_b.gradients,
                                    coarser(of_a.dtype, of_b.dtype));
  }
  diff.a = concat(a.name, " on ", to_string(mesh_shape(of_a.run.dims)));
  diff.b = concat(b.name, " on ", to_string(mesh_shape(of_b.run.dims)));
  diff.loss_a = step_a.loss;
  diff.loss_b = step_b.loss;
  const bool equal = !diff.parameters.empty() &&
                     std::ranges::all_of(diff.parameters, [](const check::ParameterVerdict& one) {
                       return one.verdict == check::Verdict::kEqual;
                     });
  if (equal) return diff;
  diff.findings = findings_of(of_a, "A");
  check::append(diff.findings, findings_of(of_b, "B"));
  return diff;
}

check::GradientDiff diff_files(const std::string& a, const std::string& b) {
  const auto open = [](const std::string& path) {
    return open_as("--diff", [&] { return open_file(path); });
  };
  const Opened of_a = open(a), of_b = open(b);
  const auto names = gradients_in(of_a);
  TESSERA_CHECK(names == gradients_in(of_b), ErrorKind::kFormat,
                "--diff: found gradients of other ", "parameters in ", shown(a), " than in ",
                shown(b), ", expected two runs of one model");
  check::GradientDiff diff{.a = a, .b = b, .dtype = coarser(of_a.dtype, of_b.dtype)};
  for (const std::string& name : names) {  // one parameter at a time is held
    diff.parameters.push_back(check::compare_gradient(
        name.substr(kGradientPrefix.size()), of_a.values(name), of_b.values(name), diff.dtype));
  }
  const auto loss_of = [](const Opened& opened, const std::string& path) {
    const auto numbers = opened.values("loss").numbers;
    const double loss = numbers.empty() ? 0.0 : numbers.front();
    TESSERA_CHECK(std::isfinite(loss), ErrorKind::kFormat, shown(path), ": found the loss ", loss,
                  ", expected a finite number");
    return loss;
  };
  diff.loss_a = loss_of(of_a, a);
  diff.loss_b = loss_of(of_b, b);
  return diff;
}

}  // namespace tessera::train
