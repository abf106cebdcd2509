#include "train/report/banner.h"

#include <algorithm>
#include <array>
#include <map>
#include <utility>

#include "base/text/printable.h"
#include "base/text/three_digits.h"
#include "fsdp/optim/optimizer_registry.h"
#include "tessera/dtype.h"
#include "tessera/error.h"
#include "train/config/config_resolve.h"
#include "train/report/metrics.h"

namespace tessera::train {
namespace {

/// Elements of a kind of dtype.
using Shares = std::map<DType, std::int64_t>;

/// "bfloat16, float32 for 1.3 %": the dtype of most elements first.
std::string shares_text(const Shares& shares) {
  std::int64_t all = 0;
  std::vector<std::pair<std::int64_t, DType>> sorted;
  for (const auto& [dtype, count] : shares) {
    all += count;
    sorted.emplace_back(-count, dtype);
  }
  std::ranges::sort(sorted);
  std::string text;
  for (const auto& [count, dtype] : sorted) {
    const double percent = 100.0 * static_cast<double>(-count) / static_cast<double>(all);
    text +=
        text.empty()
            ? std::string(to_string(dtype))
            : concat(", ", to_string(dtype), " for ",
                     percent < 0.1 ? std::string("less than 0.1") : three_digits(percent), " %");
  }
  return text;
}

template <class Of>
std::string dtypes_of(const std::vector<GradContract>& parameters, Of of) {
  Shares shares;
  for (const GradContract& one : parameters) {
    if (const std::optional<DType> dtype = of(one)) shares[*dtype] += one.numel();
  }
  return shares_text(shares);
}

std::string parameters_text(const RunFacts& run) {
  std::int64_t all = 0;
  std::int64_t trained = 0;
  for (const GradContract& one : run.parameters) {
    all += one.numel();
    if (one.trainable) trained += one.numel();
  }
  return concat(short_count(all), ", trained ", trained == all ? "all" : short_count(trained),
                run.active ? concat(", active a token ", short_count(*run.active)) : "");
}

std::string layout_text(const RunFacts& run) {
  const ParallelDims& dims = run.dims;
  std::string text = concat(dims.world_size(), dims.world_size() == 1 ? " rank" : " ranks");
  const auto add = [&](const char* name, int degree) {
    if (degree > 1) text += concat(", ", name, " ", degree);
  };
  add("pp", dims.pp);
  add("dp_replicate", dims.dp_replicate);
  add("dp_shard", dims.dp_shard);
  add("cp", dims.cp);
  add("tp", dims.tp);
  if (dims.tp > 1 && dims.sequence == SequenceParallel::kNo) text += " without sequence parallel";
  add("ep", dims.ep);
  add("etp", dims.etp);
  if (run.devices_for_ranks > 1) {
    text += concat(" on one of ", run.devices_for_ranks, " CUDA devices; --nproc ",
                   run.devices_for_ranks, " uses all of them");
  }
  return text;
}

std::string tokens_text(const RunFacts& run) {
  const std::int64_t of_rank = (run.rows + run.dims.data_ranks() - 1) / run.dims.data_ranks();
  const std::int64_t at_once = std::max<std::int64_t>(1, std::min(run.rows_at_once, of_rank));
  const std::int64_t pieces = (of_rank + at_once - 1) / at_once;
  std::string text =
      concat(with_thousands(static_cast<double>(run.rows * run.row_tokens)), " a step: ", run.rows,
             run.rows == 1 ? " row of " : " rows of ", run.row_tokens);
  if (pieces > 1) text += concat(", in ", pieces, " micro-batches of at most ", at_once, " a rank");
  return text;
}

std::string dtypes_text(const RunFacts& run) {
  using Dtype = std::optional<DType>;
  return concat("storage ",
                dtypes_of(run.parameters, [](const auto& p) -> Dtype { return p.storage.dtype; }),
                "; compute ",
                dtypes_of(run.parameters, [](const auto& p) -> Dtype { return p.compute.dtype; }),
                "; reduce ", dtypes_of(run.parameters, [](const auto& p) {
                  return p.trainable ? Dtype(p.reduce) : std::nullopt;
                }));
}

std::string threads_text(const Processor& processor) {
  return concat(processor.threads, processor.threads == 1 ? " thread a rank" : " threads a rank");
}

std::string kernels_text(const Processor& processor) {
  return concat(processor.isa, processor.has_bf16 ? "" : " without bf16 products", ", ",
                threads_text(processor));
}

std::string device_text(const RunFacts& run) {
  if (run.device.empty()) return concat("cpu, ", kernels_text(run.processor));
  return concat(run.device, ", ", threads_text(run.processor));
}

}  // namespace

std::string short_count(std::int64_t count) {
  constexpr std::array<std::pair<double, const char*>, 4> kUnits{
      {{1e12, " T"}, {1e9, " B"}, {1e6, " M"}, {1e3, " k"}}};
  for (const auto& [size, unit] : kUnits) {
    const double value = static_cast<double>(count) / size;
    if (value >= 0.9995) return three_digits(value) + unit;
  }
  return std::to_string(count);
}

std::vector<std::string> banner(const RunFacts& run) {
  const std::vector<std::pair<std::string, std::string>> lines{
      {"parameters", parameters_text(run)},
      {"layout", layout_text(run)},
      {"tokens", tokens_text(run)},
      {"dtypes", dtypes_text(run)},
      {"steps", concat(run.first_step, " to ", run.steps)},
      {"device", device_text(run)}};
  std::vector<std::string> texts;
  for (const auto& [name, value] : lines) texts.push_back(banner_line(name, value));
  return texts;
}

std::string banner_line(const std::string& name, const std::string& value) {
  constexpr std::size_t kColumn = 12;
  return name + std::string(kColumn - name.size(), ' ') + value;
}

std::optional<std::string> slow_bf16(const std::vector<GradContract>& parameters,
                                     const Processor& processor) {
  const bool any = std::ranges::any_of(parameters, [](const GradContract& one) {
    return one.compute.dtype == DType::kBFloat16 && one.shape.size() > 1;
  });
  if (processor.has_bf16 || !any) return std::nullopt;
  return "precision.param_dtype: found bfloat16 on a CPU without bf16 instructions, where a step "
         "takes about 3.4 times as long as in float32; set precision.param_dtype = \"float32\"";
}

std::optional<std::string> long_rows(std::int64_t row_tokens, std::int64_t positions,
                                     const ModelConfig& model) {
  if (row_tokens <= positions) return std::nullopt;
  const bool scratch = model.path.empty();
  return concat("training.seq_len: found rows of ", row_tokens,
                " tokens, more than max_position_embeddings ", positions, " of ",
                printable(scratch ? model.config : model.path, 1024), ": ",
                scratch ? "generate will end at that position"
                        : "the model has not seen positions behind it, and generate ends there",
                "; lower training.seq_len, or raise max_position_embeddings in its config.json");
}

std::vector<std::string> short_run(const Config& config) {
  std::vector<std::string> remarks;
  const auto& schedule = config.lr_scheduler;
  const auto steps = *config.training.steps;
  const auto lr = *config.optimizer.lr;
  if (schedule.warmup_steps > steps) {
    remarks.push_back(concat("lr_scheduler.warmup_steps: found ", schedule.warmup_steps,
                             ", more than training.steps ", steps, ": the run ends at the lr ",
                             learning_rate(schedule, lr, steps, steps), " of ", lr,
                             "; lower warmup_steps, or raise training.steps"));
  } else if (steps - schedule.decay_steps.value_or(0) < schedule.warmup_steps) {
    remarks.push_back(concat("lr_scheduler.decay_steps: found ", *schedule.decay_steps,
                             ", more than the ", steps - schedule.warmup_steps,
                             " of training.steps that warmup_steps leaves: the decay begins where "
                             "the warm-up ends; lower decay_steps, or raise training.steps"));
  }
  return remarks;
}

std::optional<std::string> unused_optimizer_keys(const OptimizerConfig& optimizer) {
  auto set = optimizer;
  if (set.momentum == fsdp::default_momentum(set.name)) set.momentum.reset();  // filled in
  std::string keys;
  for (const std::string_view key : fsdp::keys_without_effect(set.name, set)) {
    keys += concat(keys.empty() ? "" : ", ", "optimizer.", key);
  }
  if (keys.empty()) return std::nullopt;
  return concat(keys, ": without effect, since ", fsdp::name_of(optimizer.name),
                " has no such number; leave it out, or set another optimizer.name");
}

std::optional<std::string> unused_compile_keys(const CompileConfig& compile) {
  if (compile.mode != CompileChoice::kOff) return {};
  std::vector<std::string> keys;
  const auto add = [&](const char* key, bool is_set) {
    if (is_set) keys.push_back(concat("compile.", key));
  };
  add("plan", !compile.plan.empty());
  add("memory_budget", compile.memory_budget.has_value());
  add("form", compile.form != CompileConfig().form);
  add("passes", compile.passes.has_value());
  if (keys.empty()) return {};
  return concat(tessera::joined(keys),
                ": without effect, since compile.mode is \"off\"; set compile.mode = "
                "\"plan\" or \"replay\" to plan steps by them");
}

namespace {

/// The rate of a step of a run in which `left_out` steps before it made no update.
double lr_at(const Config& config, std::int64_t step, std::int64_t left_out) {
  return learning_rate(config.lr_scheduler, *config.optimizer.lr, *config.training.steps,
                       step - left_out);
}

/// Whether any step behind `done` has another rate than it would have had.
bool has_other_rates(const Config& before, const Config& now, std::int64_t done,
                     std::int64_t left_out) {
  const bool decays = before.lr_scheduler.decay != LrDecay::kConstant ||
                      now.lr_scheduler.decay != LrDecay::kConstant;
  const std::int64_t last = *now.training.steps;
  // Rates that only warm up are the same where their first and their last are.
  const std::int64_t stride = decays ? 1 : std::max<std::int64_t>(1, last - done - 1);
  for (std::int64_t step = done + 1; step <= last; step += stride) {
    if (lr_at(before, step, left_out) != lr_at(now, step, left_out)) return true;
  }
  return false;
}

}  // namespace

std::optional<std::string> changed_lr(const Config& before, const Config& now, std::int64_t done,
                                      std::int64_t left_out) {
  if (!has_other_rates(before, now, done, left_out)) return std::nullopt;
  const auto steps = *now.training.steps;
  std::string changes;
  const auto add = [&](std::string_view key, const auto& was, const auto& is) {
    if (was != is)
      changes += concat(changes.empty() ? "" : ", ", key, " was ", was, " and is ", is);
  };
  add("training.steps", *before.training.steps, steps);
  add("optimizer.lr", *before.optimizer.lr, *now.optimizer.lr);
  if (before.lr_scheduler != now.lr_scheduler) {
    changes += concat(changes.empty() ? "" : ", ", "[lr_scheduler] is another");
  }
  return concat("learning rate: ", changes, ": step ", done, " had the lr ",
                lr_at(before, done, left_out), ", step ", done + 1, " has ",
                lr_at(now, done + 1, left_out), ", the last step, ", steps, ", has ",
                lr_at(now, steps, left_out));
}

}  // namespace tessera::train
