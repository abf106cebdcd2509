#include "train/gradients.h"

#include <ATen/ATen.h>
#include <ATen/ops/empty.h>

#include <cmath>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <set>
#include <sstream>
#include <system_error>
#include <utility>
#include <vector>

#include "base/log.h"
#include "capture/replay/regions.h"
#include "check/gradient_diff.h"
#include "comm/device.h"
#include "comm/group.h"
#include "comm/host_read.h"
#include "fsdp/handle.h"
#include "grad/torch_dtype.h"
#include "io/safetensors.h"
#include "tessera/clip.h"
#include "tessera/compile.h"
#include "tessera/error.h"
#include "tessera/world.h"
#include "train/data/data.h"
#include "train/hf/model_forms.h"
#include "train/parallelize.h"
#include "train/pipeline/pipeline_step.h"
#include "train/plan_of_run.h"
#include "train/planned_steps.h"
#include "train/report/checks.h"
#include "train/report/device_limits.h"
#include "train/report/replayed_calls.h"
#include "train/step.h"

namespace tessera::train {
namespace {

std::span<const std::byte> bytes_of_tensor(const at::Tensor& tensor) {
  return {static_cast<const std::byte*>(tensor.const_data_ptr()), tensor.nbytes()};
}

/// Logits go to rank 0 row by row, so that no rank holds more than one row of every rank. Ranks of
/// cp have some positions of a row each, ranks of tp the same ones.
class LogitsWriter {
 public:
  LogitsWriter(comm::Group& control, SafetensorsWriter* writer, std::int64_t row_tokens)
      : control_(control), writer_(writer), row_tokens_(row_tokens) {}

  /// `mine`: [rows of `range`, n, V] fp32. Every rank calls it with its own range, in the same
  /// number of calls.
  void write(const LogitsOfRows& mine, RowRange range) {
    const auto most = most_rows(range);
    for (std::int64_t i = 0; i < most; ++i) {
      const std::string message =
          i < range.size() ? message_of(mine, i, range.begin + i) : std::string();
      const auto all = comm::all_gather_bytes(control_, message, "logits");
      if (writer_ == nullptr) continue;
      for (const auto& bytes : all) {
        if (!bytes.empty()) write_row(std::as_bytes(std::span(bytes)));
      }
    }
  }

 private:
  /// In front of a row's values, in this order: its number, how many ranges of positions these are,
  /// and those.
  static std::string message_of(const LogitsOfRows& mine, std::int64_t i, std::int64_t number) {
    std::string message;
    const auto add = [&](std::int64_t value) {
      message.append(reinterpret_cast<const char*>(&value), sizeof value);
    };
    add(number);
    add(std::ssize(mine.positions));
    for (const layout::Range& range : mine.positions) {
      add(range.begin);
      add(range.end);
    }
    const auto row = comm::read_on_host(mine.logits.select(0, i), "logits").contiguous();
    return message.append(static_cast<const char*>(row.const_data_ptr()), row.nbytes());
  }

  void write_row(std::span<const std::byte> bytes) {
    const auto take = [&] {
      std::int64_t value = 0;
      std::memcpy(&value, bytes.data(), sizeof value);
      bytes = bytes.subspan(sizeof value);
      return value;
    };
    const std::int64_t number = take();
    std::vector<layout::Range> ranges(static_cast<std::size_t>(take()));
    std::int64_t positions = 0;
    for (layout::Range& range : ranges) {
      range.begin = take();
      range.end = take();
      positions += range.size();
    }
    const std::size_t each = bytes.size() / static_cast<std::size_t>(positions);
    const auto vocabulary = static_cast<std::int64_t>(each / sizeof(float));
    for (const layout::Range& range : ranges) {
      const std::size_t size = each * static_cast<std::size_t>(range.size());
      const auto values = bytes.first(size);
      bytes = bytes.subspan(size);
      const std::int64_t begin = number * row_tokens_ + range.begin;
      if (!written_.insert(begin).second) continue;  // the same from a replica
      writer_->write_range("logits", begin * vocabulary, values);
    }
  }

  std::int64_t most_rows(RowRange range) {
    std::int64_t most = 0;
    const auto mine = std::to_string(range.size());
    for (const auto& text : comm::all_gather_bytes(control_, mine, "rows of logits")) {
      most = std::max<std::int64_t>(most, std::stoll(text));
    }
    return most;
  }

  comm::Group& control_;
  SafetensorsWriter* writer_;
  std::int64_t row_tokens_;
  std::set<std::int64_t> written_;  // first positions of ranges, counted over all rows
};

std::vector<TensorSpec> outputs(const GradientsRequest& request, const ModelSource& source,
                                const BatchSource& batch,
                                const std::vector<GradContract>& contracts) {
  std::vector<TensorSpec> specs{{"loss", DType::kFloat32, {1}}};
  if (request.logits) {
    specs.push_back({"logits",
                     DType::kFloat32,
                     {batch.rows_in_step(), batch.row_tokens(), source.spec.vocab_size}});
  }
  const FileForms forms = file_forms(source.description.parameters);
  for (const auto& contract : contracts) {
    if (!contract.trainable) continue;
    const FileForm form = forms.of(contract);
    for (const std::string& name : form.names) {
      specs.push_back({"grad/" + name, DType::kFloat32, form.file.shape});
    }
  }
  return specs;
}

/// The whole gradients, under the names of the folder that the model comes from. Collective.
void write_gradients(const ShardedBase& model, const std::vector<GradContract>& contracts,
                     const FileForms& forms, SafetensorsWriter* writer) {
  std::map<std::string, FileForm> form_of;
  for (const auto& contract : contracts) form_of.emplace(contract.name, forms.of(contract));
  visit_full_gradients_of_run(model, [&](const std::string& name, const at::Tensor& gradient) {
    if (writer == nullptr) return;
    const auto values =
        comm::read_on_host(gradient, "gradients of the file").to(at::kFloat).contiguous();
    const auto bytes = bytes_of_tensor(values);
    const FileForm& form = form_of.at(name);
    const std::size_t each = bytes.size() / form.names.size();
    for (std::size_t i = 0; i < form.names.size(); ++i) {
      writer->write("grad/" + form.names[i], bytes.subspan(i * each, each));
    }
  });
}

/// [compile] of the passes, behind which nothing is updated: there is no optimizer state.
/// Collective. Errors: as planned_options() and compile().
void compile_passes(const GradientsRequest& request, const ModelSource& source,
                    const ParallelDims& dims, const ModelContract& contract,
                    const BatchSource& batch, const ShardedBase& model, World& world) {
  const auto& config = request.config;
  if (config.compile.mode == CompileChoice::kOff) return;
  if (has_schedule(config)) return capture::replay_regions(model);  // the plan is the schedule's
  // The first data rank has most rows; a plan is the same on all.
  const auto pieces = pieces_of_batch(config, batch.rows_in_step(), dims, 0);
  auto of_batch = config;
  of_batch.optimizer = {};
  of_batch.optimizer.name = fsdp::OptimizerName::kSgd;
  of_batch.data.path = {request.batch};
  of_batch.pipeline.micro_batches = -1;
  of_batch.training.seq_len = batch.row_tokens();
  of_batch.training.global_batch_size = batch.rows_in_step();
  of_batch.training.local_batch_size = std::max<std::int64_t>(1, pieces.front().size());
  compile(model, planned_options(of_batch, source, dims, contract,
                                 static_cast<std::int64_t>(pieces.size()), world));
}

/// Passes whose gradients are thrown away, so that the one that is written follows a plan and
/// replays what is replayed: the first ones record, and what they record is compared. Collective.
void rehearse(ShardedBase& model, const std::function<BatchLoss()>& run, World& world) {
  constexpr int kMost = 8;  // regions that are recorded by each of them are eager in the end
  bool is_ready = false;
  for (int i = 0; i < kMost && !is_ready; ++i) {
    const auto before = replay_calls(model);
    run();
    model.zero_grad();
    // The second one is the first that follows a plan.
    const bool records = i == 0 || (replay_calls(model) - before).recorded > 0;
    is_ready = !comm::any_of_ranks(world.control(), {records}, "recorded regions")[0];
  }
}

/// The loss of the batch, with its gradients in the model. Collective. Errors: kNumeric where they
/// are not finite.
BatchLoss go_through(ShardedBase& model, const Config& config, GradScaler* scaler,
                     const std::function<BatchLoss()>& run, World& world) {
  if (config.compile.mode != CompileChoice::kOff) rehearse(model, run, world);
  BatchLoss loss = run();
  double norm = gradient_norm(model);
  if (config.compile.mode == CompileChoice::kReplay) log::info(ReplayedCalls(model).as_text());
  if (config.debug.check_placements) check_placements(model);
  // The first scale that float16 holds: of a single batch there is no next step.
  while (scaler != nullptr && std::isfinite(loss.mean()) && !scaler->update(model, norm)) {
    model.zero_grad();
    loss = run();
    norm = gradient_norm(model);
  }
  TESSERA_CHECK(std::isfinite(loss.mean()) && std::isfinite(norm), ErrorKind::kNumeric,
                "gradients: found loss ", loss.mean(), " and gradient norm ", norm,
                ", expected finite values; look at the batch, or compute in a wider dtype");
  return loss;
}

}  // namespace

void refuse_overwriting_inputs(const GradientsRequest& request) {
  namespace fs = std::filesystem;
  TESSERA_CHECK(!request.out.empty(), ErrorKind::kUsage,
                "--out: found nothing, expected a file to write");
  std::error_code unknown;  // what does not exist is equivalent to nothing
  const bool is_batch = fs::equivalent(request.out, request.batch, unknown);
  const bool is_model =
      fs::exists(request.out, unknown) &&
      fs::equivalent(fs::absolute(request.out).parent_path(), request.config.model.path, unknown);
  TESSERA_CHECK(!is_batch && !is_model, ErrorKind::kUsage, "--out: found ", request.out,
                ", which is read, expected another file");
}

std::optional<RoutingWanted> imposed_routing(bool is_asked, const models::ModelSpec& spec) {
  if (!is_asked) return std::nullopt;
  auto routed = models::routed_experts(spec);
  if (routed.layers.empty()) return std::nullopt;
  return routed;
}

std::vector<RowRange> pieces_of_batch(const Config& config, std::int64_t rows,
                                      const ParallelDims& dims, int data_rank) {
  if (config.pipeline.micro_batches == -1) {
    return micro_batches(rows, config.training.local_batch_size.value_or(rows), dims.data_ranks(),
                         data_rank);
  }
  return micro_batches_by_count(rows, static_cast<int>(config.pipeline.micro_batches),
                                dims.data_ranks(), data_rank);
}

DType coarsest_dtype(const ModelContract& contract) {
  DType coarsest = DType::kFloat64;
  const auto add = [&](DType dtype) {
    if (check::coarseness(dtype) > check::coarseness(coarsest)) coarsest = dtype;
  };
  for (const GradContract& one : contract.parameters) {
    if (!one.trainable) continue;
    add(one.compute.dtype);
    add(one.reduce);
  }
  return coarsest;
}

void run_gradients(const GradientsRequest& request, World& world,
                   const std::function<void()>& on_first_step) {
  const auto& config = request.config;
  refuse_overwriting_inputs(request);
  const auto source = open_as("--model", [&] { return open_model(config.model, config.lora); });
  const auto dims = resolve_parallelism(config.parallelism, world.size());
  const auto mesh = world.mesh(mesh_shape(dims));
  const auto batch = open_as("--batch", [&] {
    return open_gradients_batch(request.batch, vocabulary_of(source.spec, !source.folder),
                                imposed_routing(request.impose_routing, source.spec));
  });
  require_same_at_all(*batch, "--batch", world);
  check_positions(config.parallelism, batch->row_tokens());
  models::check_learned_positions(source.spec, batch->row_tokens());
  const auto plan = resolve_pipeline(
      config, dims, source.spec, source.description,
      {resolve_micro_batches(config, Verb::kGradients, batch->rows_in_step(), dims.data_ranks()),
       batch->row_tokens()});
  auto parts = model_parts(source, config, mesh, Purpose::kTraining, plan ? &*plan : nullptr);
  const ModelContract contract = parts.contract;
  const auto device = comm::facts_of(world.device());
  require_16_bits(contract.parameters, device.name, device.capability);
  const auto model = parallelize(std::move(parts), source, config, mesh);
  std::optional<PipelineOfRun> stages;
  if (plan) {
    stages.emplace(*plan, stream_borders(*plan, dims, source.description, contract), *model);
  }
  PipelineOfRun* const pipeline = stages ? &*stages : nullptr;
  const auto plan_hash = plan_hash_of_run(*model);
  std::optional<SafetensorsWriter> writer;
  if (world.rank() == 0) {
    const std::map<std::string, std::string> metadata{
        {"layout", to_string(mesh.shapes())},
        {"contract_hash", concat(hash(contract))},
        {"plan_hash", concat(plan_hash)},
        {std::string(kComputedIn), std::string(to_string(coarsest_dtype(contract)))}};
    open_as("--out", [&] {
      writer.emplace(request.out, outputs(request, source, *batch, contract.parameters), metadata);
    });
  }
  compile_passes(request, source, dims, contract, *batch, *model, world);
  const auto rows = pieces_of_batch(config, batch->rows_in_step(), dims, data_rank(mesh));
  if (config.debug.check_dtypes) {
    check_dtypes(*model, [&] { run_once(*model, *batch, 1, rows.front(), pipeline); });
  }
  if (on_first_step) on_first_step();
  if (request.logits) {
    const at::NoGradGuard no_grad;
    LogitsWriter logits(world.control(), writer ? &*writer : nullptr, batch->row_tokens());
    for (const auto& range : rows) {
      LogitsOfRows mine = logits_of(*model, *batch, 1, range, pipeline);
      const bool is_here = mine.logits.defined();  // else another stage's
      if (is_here) mine.logits = mine.logits.to(at::kFloat);
      logits.write(mine, is_here ? range : RowRange{range.begin, range.begin});
    }
  }
  const auto scaler = make_scaler(*model, contract.parameters, config.grad_scaler);
  const auto run = [&] {
    auto options = step_options(config, scaler.get());
    options.pipeline = pipeline;
    return forward_backward(*model, *batch, 1, rows, options);
  };
  const BatchLoss loss = go_through(*model, config, scaler.get(), run, world);
  write_gradients(*model, contract.parameters, file_forms(source.description.parameters),
                  writer ? &*writer : nullptr);
  if (!writer) return;
  const auto mean = at::full({1}, loss.mean(), at::TensorOptions().dtype(at::kFloat));
  writer->write("loss", bytes_of_tensor(mean));
  writer->finish();
}

namespace {

using Visit = std::function<void(const std::string&, const at::Tensor&)>;

/// Gradients of one stage, on their way from its first rank to rank 0, if it is another one.
class StageGradients {
 public:
  StageGradients(const ShardedBase& model, int first_rank)
      : model_(model), world_(*model.mesh().world()), first_rank_(first_rank) {
    if (first_rank_ != 0 && (world_.rank() == 0 || world_.rank() == first_rank_)) {
      // Control: one thread, and no other rank is connected.
      pair_ = world_.group({0, first_rank_}, "gradients control");
    }
  }

  /// On the ranks of the stage.
  void send(const Visit& visit) {
    model_.visit_full_gradients([&](const std::string& name, const at::Tensor& on_device) {
      require_more();
      const at::Tensor gradient = comm::read_on_host(on_device, name);
      if (pair_ && world_.rank() != 0) send_one(name, gradient);
      visit(name, gradient);
    });
    more(false);
  }

  /// On all others: rank 0 visits what comes.
  void receive(const Visit& visit) {
    while (more(false)) {
      if (world_.rank() == 0) receive_one(visit);
    }
  }

 private:
  /// Whether the stage has another parameter. Collective over the world.
  bool more(bool mine) {
    return comm::any_of_ranks(world_.control(), {mine}, "gradients of a stage")[0];
  }
  void require_more() { TESSERA_INVARIANT(more(true), "a gradient that no rank has"); }

  void send_one(const std::string& name, const at::Tensor& gradient) {
    std::ostringstream head;
    head << static_cast<int>(gradient.scalar_type()) << ' ' << gradient.dim();
    for (const std::int64_t size : gradient.sizes()) head << ' ' << size;
    head << ' ' << name;
    comm::all_gather_bytes(*pair_, head.str(), "name of a gradient");
    move(name, gradient.contiguous());
  }

  void receive_one(const Visit& visit) {
    const auto heads = comm::all_gather_bytes(*pair_, "", "name of a gradient");
    std::istringstream head(heads.at(1));
    int dtype = 0;
    std::size_t dims = 0;
    head >> dtype >> dims;
    std::vector<std::int64_t> sizes(dims);
    for (std::int64_t& size : sizes) head >> size;
    std::string name;
    std::getline(head >> std::ws, name);
    const auto gradient =
        at::empty(sizes, at::TensorOptions().dtype(static_cast<at::ScalarType>(dtype)));
    move(name, gradient);
    visit(name, gradient);
  }

  void move(const std::string& name, const at::Tensor& gradient) {
    if (gradient.numel() == 0) return;
    comm::Batch batch;
    batch.label = {comm::Kind::kBroadcast, name + " (gradient of a stage)"};
    batch.ops.emplace_back(comm::Broadcast{gradient.view({-1}), 1});
    pair_->issue(std::move(batch))->wait();
  }

  const ShardedBase& model_;
  World& world_;
  int first_rank_;
  std::shared_ptr<comm::Group> pair_;  // of two different ranks, on these
};

}  // namespace

void visit_full_gradients_of_run(const ShardedBase& model, const Visit& visit) {
  const Mesh& mesh = model.mesh();
  if (mesh.size_of(axis::kPipeline) == 1) return model.visit_full_gradients(visit);
  std::set<std::string> seen;
  const Visit once = [&](const std::string& name, const at::Tensor& gradient) {
    if (seen.insert(name).second) visit(name, gradient);
  };
  const std::vector<int> firsts = mesh.shapes().ranks_of(0, {axis::kPipeline});
  const auto own = static_cast<std::size_t>(mesh.coordinate(axis::kPipeline));
  for (std::size_t stage = 0; stage < firsts.size(); ++stage) {
    StageGradients of_stage(model, firsts[stage]);
    stage == own ? of_stage.send(once) : of_stage.receive(once);
  }
}

std::uint64_t plan_hash_of_run(const ShardedBase& model) {
  const Mesh& mesh = model.mesh();
  const std::uint64_t own = layout::hash(fsdp::plan_of(model));
  if (mesh.size_of(axis::kPipeline) == 1) return own;
  const auto group = mesh.world()->group(mesh.ranks_of({axis::kPipeline}), "plan control");
  std::vector<std::uint64_t> all;
  for (const auto& text : comm::all_gather_bytes(*group, concat(own), "plans of the stages")) {
    all.push_back(std::stoull(text));
  }
  return stages_hash(all);
}

}  // namespace tessera::train
