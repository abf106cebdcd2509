// The tensors of a Hugging Face folder, of one safetensors file, of a checkpoint: from headers and
// manifests, no weight is read. With --contract: what a run would agree on.
#include <algorithm>
#include <filesystem>
#include <iomanip>
#include <iostream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>
#include <vector>

#include "base/text/count_text.h"
#include "base/text/printable.h"
#include "cli/arguments.h"
#include "cli/contract_json.h"
#include "cli/contract_text.h"
#include "cli/planned_machine.h"
#include "cli/program_end.h"
#include "grad/contract_lock.h"
#include "io/checkpoint_folder.h"
#include "io/hf_folder.h"
#include "tessera/error.h"
#include "train/config/config_resolve.h"
#include "train/context_of_run.h"
#include "train/data/config_paths.h"
#include "train/data/data_files.h"
#include "train/dry/dry_batches.h"
#include "train/dry/dry_step.h"
#include "train/dry/plan_memory.h"
#include "train/dry/rank_memory.h"
#include "train/dry/step_traffic.h"
#include "train/expert_balance.h"
#include "train/parallelize.h"
#include "train/pipeline/pipeline_memory.h"
#include "train/pipeline/pipeline_plan.h"
#include "train/plan_of_run.h"
#include "train/plan_of_step.h"
#include "train/planned_steps.h"

namespace tessera::cli {
namespace {

struct ListedTensor {
  std::string name;
  DType dtype = DType::kFloat32;
  std::vector<std::int64_t> shape;
  std::int64_t elements = 0;
  std::int64_t bytes = 0;
  Json file;    ///< its name; null where no single file holds the tensor
  Json pieces;  ///< of a checkpoint's tensor, as in its manifest
};

/// The values that both outputs show.
struct Listing {
  std::vector<ListedTensor> tensors;
  std::int64_t elements = 0;
  std::int64_t bytes = 0;
  std::size_t num_files = 0;
  std::optional<std::int64_t> step;  ///< of a checkpoint
  Json files;                        ///< of a checkpoint: name, size and hash of every one

  void add(ListedTensor tensor) {
    // A manifest may claim anything; sizes of files are compared with it, not those of tensors.
    TESSERA_CHECK(!__builtin_add_overflow(elements, tensor.elements, &elements) &&
                      !__builtin_add_overflow(bytes, tensor.bytes, &bytes),
                  ErrorKind::kFormat, printable(tensor.name),
                  ": found more bytes in all tensors up to here than 64 bits count");
    tensors.push_back(std::move(tensor));
  }
};

Listing listing_of(const HfFolder& folder) {
  Listing listing;
  for (const auto& [name, tensor] : folder.tensors()) {
    const TensorInfo& info = *tensor.info;
    listing.add({.name = name,
                 .dtype = info.dtype,
                 .shape = info.shape,
                 .elements = info.numel(),
                 .bytes = info.size_bytes(),
                 .file = folder.file(tensor.file).path().filename().string(),
                 .pieces = {}});
  }
  listing.num_files = folder.num_files();
  return listing;
}

Json piece_json(const CheckpointPiece& piece) {
  return {{"file", piece.file},
          {"key", piece.key},
          {"box", {{"offset", piece.box.offset}, {"size", piece.box.size}}},
          {"begin", piece.begin},
          {"end", piece.end}};
}

/// The one that holds all of a tensor.
Json file_of(const std::vector<CheckpointPiece>& pieces) {
  const auto elsewhere = [&](const auto& piece) { return piece.file != pieces.front().file; };
  if (pieces.empty() || std::ranges::any_of(pieces, elsewhere)) return nullptr;
  return pieces.front().file;
}

Listing listing_of(const CheckpointFolder& checkpoint) {
  Listing listing;
  for (const auto& [name, tensor] : checkpoint.tensors()) {
    Json pieces = Json::array();
    for (const CheckpointPiece& piece : tensor.pieces) pieces.push_back(piece_json(piece));
    listing.add({.name = name,
                 .dtype = tensor.dtype,
                 .shape = tensor.shape,
                 .elements = tensor.numel(),
                 .bytes = tensor.numel() * size_of(tensor.dtype),
                 .file = file_of(tensor.pieces),
                 .pieces = std::move(pieces)});
  }
  listing.num_files = checkpoint.data_files().size();
  listing.step = checkpoint.manifest().step;
  listing.files = Json::object();
  for (const auto& [name, file] : checkpoint.manifest().files) {
    listing.files[name] = {{"bytes", file.bytes}, {"xxh3_128", to_string(file.xxh3_128)}};
  }
  return listing;
}

// Without the quotes of a message: a table has its own borders.
std::string shown_name(std::string_view name) {
  const std::string quoted = printable(name);
  return quoted.substr(1, quoted.size() - 2);
}

void print_table(const Listing& listing) {
  std::size_t widest = 0;
  for (const auto& tensor : listing.tensors) {
    widest = std::max(widest, shown_name(tensor.name).size());
  }
  if (listing.step) std::cout << "step " << *listing.step << ": ";
  std::cout << listing.tensors.size() << " tensors, " << listing.elements << " elements, "
            << listing.bytes << " bytes in "
            << count_text(static_cast<std::int64_t>(listing.num_files), "file") << "\n\n";
  for (const auto& tensor : listing.tensors) {
    std::cout << std::left << std::setw(static_cast<int>(widest) + 2) << shown_name(tensor.name)
              << std::setw(10) << to_string(tensor.dtype) << std::setw(20)
              << shape_text(tensor.shape) << std::right << std::setw(14) << tensor.bytes
              << " bytes";
    if (listing.step)
      std::cout << " in " << count_text(static_cast<std::int64_t>(tensor.pieces.size()), "piece");
    std::cout << '\n';
  }
}

void print_listing_json(const Listing& listing) {
  Json whole;
  if (listing.step) whole["step"] = *listing.step;
  Json& tensors = whole["tensors"] = Json::object();
  for (const auto& tensor : listing.tensors) {
    Json one = {{"dtype", to_string(tensor.dtype)},
                {"shape", tensor.shape},
                {"bytes", tensor.bytes},
                {"file", tensor.file}};
    if (listing.step) one["pieces"] = tensor.pieces;
    tensors[tensor.name] = std::move(one);
  }
  if (listing.step) whole["files"] = listing.files;
  whole["total"] = {{"tensors", listing.tensors.size()},
                    {"elements", listing.elements},
                    {"bytes", listing.bytes},
                    {"files", listing.num_files}};
  std::cout << whole.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) << '\n';
}

Listing listing_at(const std::string& path) {
  if (std::filesystem::is_directory(path) && CheckpointFolder::is_one(path)) {
    return listing_of(CheckpointFolder::open(path));
  }
  const bool is_file = path.ends_with(".safetensors") && !std::filesystem::is_directory(path);
  return listing_of(is_file ? HfFolder::of_file(path) : HfFolder::open(path));
}

std::int64_t kept_bytes(const layout::ModelPlan& plan) {
  std::int64_t bytes = 0;
  for (const auto& unit : plan.units) {
    for (const auto& bucket : unit.plan.buckets) bytes += layout::shard_bytes(bucket);
  }
  return bytes;
}

/// The plan of a run: one without a pipeline, or one for each place on the pipeline's axis.
struct Planned {
  MeshShapes mesh;
  train::ExpertLoads loads = {};
  ModelContract contract;
  std::optional<train::ContextOfRun> context = {};  ///< where rows are cut
  std::vector<std::string> context_lines = {};      ///< of a lock
  layout::ModelPlan plan;
  train::MemoryTable memory;
  train::StepTraffic traffic;
  check::Machine machine = {};                      ///< as the options describe it
  std::string memory_from = {};                     ///< who says what a rank's memory is
  std::string rates_from = {};                      ///< who says how fast it is
  std::optional<capture::SimulatedStep> step = {};  ///< where the machine gives_time()

  struct Pipelined {
    train::PipelinePlan plan;
    std::vector<train::RankPlan> ranks;
    train::PipelineMemory memory;
    std::vector<train::StepTraffic> traffic;  ///< by rank

    std::uint64_t plan_hash() const {
      std::vector<std::uint64_t> hashes;
      for (const auto& rank : ranks) hashes.push_back(layout::hash(rank.plan));
      return train::stages_hash(hashes);
    }
  };
  std::optional<Pipelined> pipelined = {};
};

Planned::Pipelined plan_pipeline(const train::Config& config, const train::ModelSource& source,
                                 const ParallelDims& dims, const Planned& planned,
                                 train::PipelinePlan plan) {
  Planned::Pipelined found{.plan = std::move(plan), .ranks = {}, .memory = {}, .traffic = {}};
  found.ranks =
      train::plan_ranks(source.description, planned.contract.parameters, planned.mesh, found.plan);
  const train::Config stepped = train::stepped_config(config, dims);
  std::vector<train::DryStep> steps;
  for (const int rank : planned.mesh.ranks_of(0, {axis::kPipeline})) {
    const train::RankPlan& of = found.ranks.at(steps.size());
    const int busiest = train::busiest_rank(planned.loads, planned.mesh, rank);
    steps.push_back(
        train::dry_step(stepped, source, busiest, planned.mesh.size(), {.loads = planned.loads}));
    found.traffic.push_back(train::most_traffic(config, source, planned.mesh,
                                                {stepped, busiest, steps.back(), planned.loads}));
    found.traffic.back().matrices =
        train::sent_of_matrices(config, of.parameters, planned.contract.parameters, of.plan, rank);
  }
  found.memory = train::pipeline_memory(config, source, dims, found.plan, steps, planned.loads);
  found.memory.computes_on = train::computes_on(config);
  return found;
}

Planned plan_run(const InspectArguments& arguments) {
  Planned planned;
  planned.machine = machine_of(arguments.machine);
  train::Config config =
      train::open_as("--contract", [&] { return train::load_config(arguments.contract_file); });
  apply(arguments.overrides, config);
  take_device(arguments.machine, config);
  train::validate(config, train::Verb::kContract);
  train::require_relative_paths(config, arguments.contract_file, train::Verb::kContract);
  config = train::with_context_parts(std::move(config));
  const int world = arguments.world ? *arguments.world : train::ranks_to_spawn(config.parallelism);
  const ParallelDims dims = train::resolve_parallelism(config.parallelism, world);
  config.model.path = train::newest_checkpoint(config.model.path, "model.path");
  const train::ModelSource source = train::open_as(
      train::model_key(config.model), [&] { return train::open_model(config.model, config.lora); });
  config = train::with_rows_of_data(std::move(config), source, dims);
  planned.loads = train::read_expert_loads(arguments.expert_loads, source.spec);
  planned.memory_from = memory_from(planned.machine, arguments.machine);
  planned.rates_from = rates_from(planned.machine, arguments.machine);
  planned.mesh = train::mesh_shape(dims);
  planned.contract = train::resolve_model(source, config, dims);
  planned.context = train::context_of_run(config, source.spec, dims, planned.contract,
                                          train::computes_on(config));
  planned.context_lines = train::context_lock_lines(dims);
  const bool has_time = gives_time(planned.machine, arguments.machine, config, world);
  TESSERA_CHECK(!arguments.machine.flops || dims.pp == 1, ErrorKind::kConfig, "--flops: found ",
                dims.pp,
                " stages, expected parallelism.pipeline_parallel_degree = 1: tessera schedule has "
                "the times of a pipeline");
  auto pipeline =
      train::resolve_pipeline(config, dims, source.spec, source.description,
                              {.micro_batches = train::resolve_micro_batches(
                                   config, train::Verb::kContract,
                                   train::rows_in_step(config.training, dims), dims.data_ranks()),
                               .row_tokens = config.training.seq_len.value_or(0)});
  if (pipeline) {
    train::note_copies(*pipeline, source.description, planned.contract);
    planned.pipelined = plan_pipeline(config, source, dims, planned, std::move(*pipeline));
    return planned;
  }
  planned.plan = train::plan_model(source.description, planned.contract.parameters, planned.mesh,
                                   train::buckets_here(config));
  const train::RunOfPlan run{
      .config = config,
      .spec = source.spec,
      .description = source.description,
      .dims = dims,
      .contract = planned.contract,
      .plan = planned.plan,
      .aux_loss_coef = train::aux_loss_coef(config.model.aux_loss_coef, source.spec)};
  const train::MachineMemory machine = train::memory_here(
      config, world,
      {.device_bytes = planned.machine.memory, .ranks_per_host = planned.machine.ranks_per_host});
  const train::Config counted = train::with_budget_in_bytes(config, machine);
  const train::Config stepped = train::stepped_config(counted, dims);
  const int busiest = train::busiest_rank(planned.loads, planned.mesh, 0);
  const train::DryStep step =
      train::dry_step(stepped, source, busiest, world, {.loads = planned.loads});
  planned.memory = train::memory_table(config, source, dims, step, planned.loads);
  planned.memory.computes_on = train::computes_on(config);
  planned.traffic =
      train::most_traffic(config, source, planned.mesh, {stepped, busiest, step, planned.loads});
  planned.traffic.matrices = train::sent_of_matrices(config, source.description.parameters,
                                                     planned.contract.parameters, planned.plan, 0);
  if (has_time) {
    const auto steps = train::plan_of_steps(run, train::plan_memory(config, source, dims), machine);
    planned.step = step_at(planned.machine, run, steps, planned.traffic);
  }
  return planned;
}

void print_size(const Planned& planned) {
  const ModelContract& contract = planned.contract;
  std::cout << contract.parameters.size() << " parameters, " << contract.buffers.size()
            << " buffers on " << to_string(planned.mesh) << "\ncontract hash " << hash(contract)
            << "\n\n";
  if (planned.context) {
    std::cout << contract_text(*planned.context) << costs_text(*planned.context) << '\n';
  }
}

void print_contract(const ModelContract& contract, Layers layers) {
  std::cout << '\n' << to_string(layers == Layers::kAll ? contract : folded(contract)) << '\n';
}

void print_plan(const layout::ModelPlan& plan, Layers layers) {
  std::cout << count_text(std::ssize(plan.units), "unit") << " over "
            << count_text(plan.options.ranks, "rank") << ", parameters begin at multiples of "
            << plan.options.alignment_bytes << " B, plan hash " << layout::hash(plan) << "\n"
            << plan_text(plan, layers) << "a rank keeps " << size_text(kept_bytes(plan))
            << " of parameters\n";
}

/// Bytes of the rank that takes most, in the configured mode; none where activations are not known.
std::optional<std::int64_t> most_taken(const Planned& planned) {
  if (!planned.pipelined) {
    const train::MemoryTable& memory = planned.memory;
    return memory.activations.empty() ? std::nullopt : std::optional(memory.total(memory.mode));
  }
  const train::PipelineMemory& memory = planned.pipelined->memory;
  if (!memory.knows_activations) return std::nullopt;
  std::int64_t most = 0;
  for (const auto& rank : memory.ranks) most = std::max(most, rank.total(memory.mode));
  return most;
}

void print_whether_it_fits(const Planned& planned) {
  if (!planned.machine.memory) return;
  const auto taken = most_taken(planned);
  std::cout << "  " << planned.memory_from << ' '
            << (taken ? fits_text(*planned.machine.memory, *taken)
                      : std::string("fits or not: set training.seq_len to know"))
            << '\n';
}

void print_pipeline(const Planned::Pipelined& pipelined, Layers layers) {
  std::cout << "plan hash " << pipelined.plan_hash() << "\n";
  for (std::size_t rank = 0; rank < pipelined.ranks.size(); ++rank) {
    std::cout << "\npp " << rank << ": ";
    print_plan(pipelined.ranks[rank].plan, layers);
    std::cout << to_string(pipelined.traffic[rank]);
  }
}

void print_text(const Planned& planned, Layers layers) {
  print_size(planned);
  if (planned.pipelined) {
    std::cout << to_string(planned.pipelined->memory);
    print_whether_it_fits(planned);
    std::cout << '\n' << to_string(planned.pipelined->plan);
    print_contract(planned.contract, layers);
    return print_pipeline(*planned.pipelined, layers);
  }
  std::cout << to_string(planned.memory);
  print_whether_it_fits(planned);
  std::cout << '\n' << to_string(planned.traffic);
  if (planned.step) std::cout << time_line(planned.rates_from, *planned.step);
  print_contract(planned.contract, layers);
  print_plan(planned.plan, layers);
}

/// The plan of each place on axis pp, with its units.
Json pipeline_json(const Planned::Pipelined& pipelined) {
  Json stages = Json::array();
  for (int stage = 0; stage < pipelined.plan.split.stages(); ++stage) {
    stages.push_back(
        {{"rank", pipelined.plan.schedule.rank_of.at(static_cast<std::size_t>(stage))},
         {"first_layer", pipelined.plan.split.begin(stage)},
         {"end_layer", pipelined.plan.split.end(stage)},
         {"forward_flops_per_token", pipelined.plan.costs.at(static_cast<std::size_t>(stage))}});
  }
  Json ranks = Json::array();
  for (std::size_t rank = 0; rank < pipelined.ranks.size(); ++rank) {
    const train::RankPlan& of_rank = pipelined.ranks[rank];
    Json units = Json::array();
    for (const auto& unit : of_rank.plan.units) {
      units.push_back({{"name", unit.plan.name}, {"buckets", buckets_of(unit)}});
    }
    Json one{{"plan_hash", concat(layout::hash(of_rank.plan))},
             {"units", units},
             {"shard_bytes", kept_bytes(of_rank.plan)}};
    add_traffic(pipelined.traffic[rank], one);
    one["rank_memory_bytes"] = json_of(pipelined.memory.ranks.at(rank), pipelined.memory);
    ranks.push_back(std::move(one));
  }
  return {{"schedule", pipelined.plan.name},
          {"micro_batches", pipelined.plan.schedule.micro_batches},
          {"reshard", word_of(pipelined.plan.reshard)},
          {"hash", concat(hash(pipelined.plan))},
          {"stages", stages},
          {"ranks", ranks}};
}

void print_contract_json(const Planned& planned) {
  Json parameters = Json::array();
  for (const auto& contract : planned.contract.parameters) parameters.push_back(json_of(contract));
  Json buffers = Json::array();
  for (const auto& contract : planned.contract.buffers) buffers.push_back(json_of(contract));
  if (planned.pipelined) {
    const Json whole = {{"layout", to_string(planned.mesh)},
                        {"world_size", planned.mesh.size()},
                        {"contract_hash", concat(hash(planned.contract))},
                        {"plan_hash", concat(planned.pipelined->plan_hash())},
                        {"context", json_of(planned.context)},
                        {"parameters", parameters},
                        {"buffers", buffers},
                        {"pipeline", pipeline_json(*planned.pipelined)}};
    std::cout << whole.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) << '\n';
    return;
  }
  Json units = Json::array();
  for (std::size_t i = 0; i < planned.plan.units.size(); ++i) {
    const layout::PlannedUnit& unit = planned.plan.units[i];
    units.push_back(casts_of(planned.contract.units.at(i)));
    units.back()["buckets"] = buckets_of(unit);
  }
  // The hashes as text, as in the metadata of `gradients`: they have 64 bits.
  Json whole = {{"layout", to_string(planned.mesh)},
                {"world_size", planned.mesh.size()},
                {"contract_hash", concat(hash(planned.contract))},
                {"plan_hash", concat(layout::hash(planned.plan))},
                {"context", json_of(planned.context)},
                {"alignment_bytes", planned.plan.options.alignment_bytes},
                {"parameters", parameters},
                {"buffers", buffers},
                {"units", units},
                {"shard_bytes", kept_bytes(planned.plan)}};
  add_traffic(planned.traffic, whole);
  if (planned.step) whole["step_time_ms"] = json_of(*planned.step);
  whole["rank_memory_bytes"] = json_of(planned.memory);
  std::cout << whole.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) << '\n';
}

/// Prints what a run of a configuration would agree on before its first collective, and what it
/// would take of a rank's memory, for any number of ranks. No weight is read, nothing is allocated,
/// no rank is started.
void inspect_contract(const InspectArguments& arguments) {
  if (arguments.lock) try_output("--lock", *arguments.lock, arguments.contract_file);
  const Planned planned = plan_run(arguments);
  if (arguments.lock) {
    write_output("--lock", *arguments.lock,
                 grad::contract_lock(planned.contract, planned.context_lines));
  }
  if (arguments.json) return print_contract_json(planned);
  print_text(planned, arguments.all ? Layers::kAll : Layers::kFolded);
}

}  // namespace

int run_inspect(const InspectArguments& arguments) {
  if (!arguments.contract_file.empty()) {
    inspect_contract(arguments);
    return kDone;
  }
  TESSERA_CHECK(arguments.overrides.empty(), ErrorKind::kUsage, "--",
                arguments.overrides.empty() ? "" : arguments.overrides.front().first,
                ": found with a folder, expected it with --contract only");
  const std::string folder = train::newest_checkpoint(arguments.folder, "DIR");
  const Listing listing = train::open_as("DIR", [&] { return listing_at(folder); });
  arguments.json ? print_listing_json(listing) : print_table(listing);
  return kDone;
}

}  // namespace tessera::cli
