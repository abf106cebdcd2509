#include "train/config/config_names.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <utility>

#include "base/text/printable.h"
#include "base/text/wildcard.h"
#include "tessera/error.h"
#include "train/config/config_codec.h"
#include "train/config/config_keys.h"

namespace tessera::train {
namespace {

constexpr std::string_view kTokenize = "data is tokens already, which tools/tokenize.py makes";
constexpr std::string_view kChat = "tools/tokenize.py --chat reads conversations and masks them";
constexpr std::string_view kLaunched = "ranks come from --nproc or the launcher";
constexpr std::string_view kOneAttention =
    "which attention runs follows from the model and the device";
constexpr std::string_view kWholeSteps =
    "a run has steps, not epochs: an epoch is rows of the data / training.global_batch_size";
constexpr std::string_view kNoFloat8 =
    "products in 8 or 4 bits are not there; see precision.param_dtype";
constexpr std::string_view kNoTracker =
    "metrics.jsonl in the run's folder has every number; see metrics.enable_tensorboard";
constexpr std::string_view kNoWorkers = "rows are read from mapped files, without workers";
constexpr std::string_view kBetas = "both in one list, as [0.9, 0.95]";
constexpr std::string_view kExport =
    "`tessera convert` makes a Hugging Face folder of a checkpoint";
constexpr std::string_view kStateInMemory =
    "what a rank trains is in the memory that trains it; parallelism.data_parallel_shard_degree "
    "shares it among more ranks, lora.rank and model.freeze train less, optimizer.name SGD "
    "keeps less";
constexpr std::string_view kHeld = "`tessera inspect --contract` says what a step holds";
constexpr std::string_view kFused = "every optimizer updates in one pass";
constexpr std::string_view kFamilies =
    "the family is that of config.json, at model.path or as model.config";
constexpr std::string_view kSharded = "the model is always sharded over as many ranks as this says";

constexpr auto kOtherKeys = std::to_array<OtherName>({
    // Rows and steps.
    {"max_steps num_steps train_iters max_iters total_steps", "training.steps"},
    {"num_train_epochs num_epochs epochs max_epochs", "training.steps", kWholeSteps},
    {"sequence_len max_seq_len max_seq_length seq_length sequence_length max_length block_size "
     "model_max_length cutoff_len context_length",
     "training.seq_len"},
    {"per_device_train_batch_size micro_batch_size train_micro_batch_size_per_gpu mbs lbs",
     "training.local_batch_size"},
    {"batch_size", "training.local_batch_size",
     "rows of a micro-batch on a rank; training.global_batch_size is all rows of a step"},
    {"train_batch_size gbs", "training.global_batch_size"},
    {"gradient_accumulation_steps gradient_accumulation grad_accum_steps",
     "training.global_batch_size",
     "a multiple of training.local_batch_size x data ranks makes micro-batches"},
    {"per_device_eval_batch_size eval_batch_size", "training.local_batch_size",
     "a validation has the batches of training"},
    {"max_grad_norm gradient_clipping gradient_clip_val clip_grad_norm clip_grad grad_clip",
     "training.max_norm"},
    // Data.
    {"dataset dataset_path dataset_name datasets train_file data_path train_data data_files",
     "data.path", "files; tools/tokenize.py makes tokens of a dataset"},
    {"sample_packing", "data.packing", "\"documents\" packs whole ones, each as if it were alone"},
    {"pad_to_sequence_len pad_to_max_length padding", "",
     "rows are always whole; see data.packing"},
    {"dataset_prepared_path tokenizer_type tokenizer_name special_tokens tokens", "", kTokenize},
    {"tokenizer_path tokenizer tokenizer_config tokenizer_use_fast", "", kTokenize},
    {"chat_template train_on_inputs roles_to_train field_messages", "", kChat},
    {"dataloader_num_workers num_workers dataloader_prefetch_factor dataloader_pin_memory", "",
     kNoWorkers},
    {"shuffle group_by_length train_sampling_strategy dataloader_drop_last", "",
     "rows come in an order that is drawn from debug.seed"},
    {"data_seed", "debug.seed", "of weights and of the order of rows"},
    {"val_set_size test_datasets validation_file eval_dataset val_data validation.dataset "
     "validation.dataset_path validation.enable",
     "validation.path", "files of their own"},
    {"eval_steps eval_interval evaluation_interval eval_freq evals_per_epoch eval_strategy "
     "evaluation_strategy validation.freq",
     "validation.interval", "in steps"},
    {"eval_iters max_eval_steps", "validation.steps"},
    // The model.
    {"model_name_or_path base_model pretrained_model_name_or_path hf_assets_path model_path "
     "initial_load_path model.initial_load_path",
     "model.path", "a folder on this machine"},
    {"model.name flavor model_flavor model.flavor config_name", "model.config",
     "the config.json of a model from scratch; model.path is that of a pretrained one"},
    {"model_type base_model_config trust_remote_code", "", kFamilies},
    {"unfrozen_parameters freeze_layers freeze_modules", "model.freeze"},
    {"router_aux_loss_coef moe_aux_loss_coeff aux_loss_alpha", "model.aux_loss_coef"},
    {"attn_implementation flash_attention flash_attn use_flash_attention_2 sdp_attention "
     "xformers_attention attn_type attn_mask_type flex_attention",
     "", kOneAttention},
    // Numbers.
    {"bf16 fp16 mixed_precision mixed_precision_param", "precision.param_dtype",
     "\"bfloat16\" or \"float16\""},
    {"mixed_precision_reduce", "precision.reduce_dtype"},
    {"torch_dtype training.dtype", "precision.storage_dtype",
     "what weights are kept in; precision.param_dtype is what is computed in"},
    {"fp8 float8 load_in_8bit load_in_4bit quantization_config enable_fsdp_float8_all_gather "
     "model.converters",
     "", kNoFloat8},
    {"tf32", "", "products in float32 are whole; see precision.param_dtype"},
    {"loss_scale initial_scale_power initial_loss_scale", "grad_scaler.init_scale"},
    {"gradient_checkpointing gradient_checkpointing_kwargs activation_checkpointing "
     "activation_checkpointing_kwargs recompute_granularity",
     "activation_checkpoint.mode", "\"none\", \"selective\" or \"full\""},
    {"selective_ac_option per_op_sac_force_recompute_mm_shapes_by_fqns",
     "activation_checkpoint.mode", "\"selective\" keeps the results of weight products"},
    // The update.
    {"learning_rate max_lr peak_lr base_lr", "optimizer.lr"},
    {"optim optimizer_name optimizer_type", "optimizer.name"},
    {"adam_beta1 adam_beta2 beta1 beta2 beta_1 beta_2 adam_betas", "optimizer.betas", kBetas},
    {"adam_epsilon epsilon adam_eps", "optimizer.eps"},
    {"wd adam_weight_decay", "optimizer.weight_decay"},
    {"fused foreach optim_args early_step_in_backward optimizer.implementation", "", kFused},
    {"warmup num_warmup_steps lr_warmup_steps warmup_iters", "lr_scheduler.warmup_steps"},
    {"warmup_ratio lr_warmup_ratio", "lr_scheduler.warmup_steps", "steps, no share of them"},
    {"lr_scheduler_type lr_scheduler_name lr_decay_style decay_type lr_scheduler_kwargs "
     "lr_schedule",
     "lr_scheduler.decay"},
    {"decay_ratio lr_decay_steps", "lr_scheduler.decay_steps",
     "steps at the end, with lr_scheduler.decay = \"wsd\""},
    {"lr_min min_lr min_lr_ratio cosine_min_lr_ratio", "lr_scheduler.min_lr_factor",
     "a part of optimizer.lr"},
    {"label_smoothing label_smoothing_factor neftune_noise_alpha z_loss", "",
     "the loss is the mean cross entropy of the labels; see model.aux_loss_coef"},
    // Layouts.
    {"cp cp_size cp_degree context_parallel_size sequence_parallel_degree "
     "ulysses_sequence_parallel_size",
     "parallelism.context_parallel_degree"},
    {"context_parallel_rotate_method ring_attn_func cp_comm_type",
     "parallelism.context_parallel_form",
     "\"gather\" of keys and values, or \"heads\" in exchange for positions; there is no ring"},
    {"context_parallel_load_balancer", "parallelism.context_parallel_parts",
     "rows are balanced, packed ones by their documents; a number of parts"},
    {"tp tp_size tp_degree tensor_parallel_size tensor_model_parallel_size",
     "parallelism.tensor_parallel_degree"},
    {"pp pp_size pp_degree pipeline_parallel_size pipeline_model_parallel_size",
     "parallelism.pipeline_parallel_degree"},
    {"ep ep_size ep_degree expert_parallel_size expert_model_parallel_size",
     "parallelism.expert_parallel_degree"},
    {"etp expert_tensor_parallel_size", "parallelism.expert_tensor_parallel_degree"},
    {"dp dp_size dp_shard dp_shard_size data_parallel_size data_parallel_degree fsdp fsdp_config "
     "deepspeed use_fsdp sharding_strategy",
     "parallelism.data_parallel_shard_degree", kSharded},
    {"dp_replicate dp_replicate_size", "parallelism.data_parallel_replicate_degree"},
    {"zero_stage zero_optimization", "compile.form", "3, 2 or 1, with compile.mode"},
    {"fsdp_reshard_after_forward", "parallelism.reshard_after_forward"},
    {"enable_sequence_parallel", "parallelism.sequence_parallel"},
    {"disable_loss_parallel enable_async_tensor_parallel enable_compiled_autograd", "",
     "see parallelism.tensor_parallel_degree"},
    {"offload_folder fsdp_cpu_offload enable_cpu_offload cpu_offload", "", kStateInMemory},
    {"ddp_find_unused_parameters ddp_bucket_cap_mb", "",
     "unused parameters are found, and buckets follow from the units"},
    {"pipeline_parallel_schedule pp_schedule", "pipeline.schedule"},
    {"pipeline_parallel_schedule_csv", "pipeline.schedule_file"},
    {"pipeline_parallel_microbatch_size pipeline_parallel_microbatches", "pipeline.micro_batches",
     "their number; of training.local_batch_size rows each"},
    {"pipeline_parallel_split_points pipeline_parallel_layers_per_stage "
     "module_fqns_per_model_part pipeline_parallel_first_stage_less_layers",
     "pipeline.split", "first layers of the stages"},
    {"torch_compile torch_compile_backend torch_compile_mode compile.enable compile.components "
     "training.compile",
     "compile.mode", "\"plan\" or \"replay\"; PyTorch's compiler is not used"},
    {"local_rank nproc_per_node nnodes num_processes world_size num_gpus", "", kLaunched},
    {"ddp_timeout train_timeout_seconds dist_timeout", "comm.timeout_seconds"},
    {"ddp_backend dist_backend", "comm.backend"},
    {"trace_buf_size save_traces_file_prefix", "", "see metrics.trace_steps"},
    {"no_cuda use_cpu device_map use_cuda", "device"},
    // Checkpoints.
    {"output_dir out_dir save_dir run_name experiment_name exp_name job.name job.description",
     "job.dump_folder"},
    {"enable_checkpoint", "checkpoint.enable"},
    {"checkpoint_dir", "checkpoint.folder"},
    {"save_steps save_interval saves_per_epoch save_strategy save_freq checkpointing_steps",
     "checkpoint.interval", "in steps"},
    {"save_total_limit keep_last_n max_checkpoints", "checkpoint.keep_latest_k"},
    {"resume_from_checkpoint auto_resume_from_checkpoints resume load_checkpoint",
     "checkpoint.load_step", "by default a run resumes from the latest in its job.dump_folder"},
    {"async_mode async_save", "", "checkpoints are always written while steps run"},
    {"export_dtype last_save_model_only last_save_in_hf save_safetensors save_only_model "
     "push_to_hub hub_model_id hub_strategy hub_token initial_load_in_hf",
     "", kExport},
    {"load_best_model_at_end metric_for_best_model early_stopping_patience", "",
     "checkpoints are kept by their number; see checkpoint.keep_latest_k"},
    // Metrics.
    {"logging_steps log_interval log_every_n_steps log_every", "metrics.log_freq"},
    {"logging_dir log_dir save_tb_folder tensorboard_dir", "metrics.folder"},
    {"report_to use_tensorboard enable_tb", "metrics.enable_tensorboard"},
    {"enable_wandb use_wandb wandb_project wandb_name wandb_entity wandb_run_id wandb_mode "
     "use_mlflow mlflow_tracking_uri mlflow_experiment_name use_comet comet_project_name",
     "", kNoTracker},
    {"disable_color_printing disable_tqdm logging_first_step logging_strategy save_for_all_ranks",
     "", "see metrics.log_freq"},
    {"enable_profiling profile_freq profiler_steps profiler_active profiler_warmup",
     "metrics.trace_steps", "the steps that are traced; --profile sums them up"},
    {"enable_memory_snapshot save_memory_snapshot_folder", "", kHeld},
    {"full_determinism", "debug.deterministic"},
    {"gc_freq gc_debug torch_empty_cache_steps", "", "nothing is collected as garbage here"},
    {"print_args", "", "the option --print-config shows the whole configuration"},
    {"do_train do_eval do_predict", "", "see validation.path"},
    // Adapters.
    {"adapter use_peft use_lora peft_config lora_r lora_rank", "lora.rank"},
    {"lora_alpha", "lora.alpha"},
    {"lora_dropout", "lora.dropout"},
    {"lora_target_modules target_modules lora_target_linear", "lora.targets",
     "ends of layers' names"},
    {"lora_modules_to_save modules_to_save use_rslora use_dora peft_use_dora", "",
     "with adapters nothing else is trained; see lora.targets"},
});

constexpr auto kOtherSections = std::to_array<OtherName>({
    {"train trainer", "training"},
    {"dataset datasets dataloader", "data"},
    {"distributed parallel", "parallelism"},
    {"mixed_precision dtypes", "precision"},
    {"activation_checkpointing gradient_checkpointing", "activation_checkpoint"},
    {"scheduler lr", "lr_scheduler"},
    {"optim", "optimizer"},
    {"eval evaluation", "validation"},
    {"logging", "metrics"},
    {"peft adapter", "lora"},
    {"profiling profiler", "", "see metrics.trace_steps, and the option --profile"},
    {"float8 quantize mx quantization", "", kNoFloat8},
    {"wandb", "", kNoTracker},
    {"tokenizer", "", kTokenize},
    {"memory_estimation", "", kHeld},
    {"deepspeed fsdp", "parallelism"},
    {"experimental fault_tolerance", "", "there is no such part"},
});

/// As torchtitan's options are written: --training.seq-len.
std::string plain(std::string_view name) {
  std::string text(name);
  for (char& c : text)
    c = c == '-' ? '_' : static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return text;
}

bool has_word(std::string_view words, std::string_view word) {
  while (!words.empty()) {
    const std::size_t space = std::min(words.find(' '), words.size());
    if (words.substr(0, space) == word) return true;
    words.remove_prefix(std::min(space + 1, words.size()));
  }
  return false;
}

const OtherName* find_in(std::span<const OtherName> table, std::string_view name) {
  const auto row = std::ranges::find_if(
      table, [&](const OtherName& other) { return has_word(other.theirs, name); });
  return row == table.end() ? nullptr : &*row;
}

/// Section and name; no section where there is no dot.
std::pair<std::string, std::string> split(std::string_view full_name) {
  const std::size_t dot = full_name.find('.');
  if (dot == std::string_view::npos) return {"", plain(full_name)};
  return {plain(full_name.substr(0, dot)), plain(full_name.substr(dot + 1))};
}

std::string shown_key(std::string_view key, KeysIn where) {
  return where == KeysIn::kFile ? in_quotes(key) : concat("--", key);
}

/// The section that was meant: of this name, as others call it, or misspelt; "" where none is.
std::string section_meant(const std::string& name) {
  if (name.empty() || is_section(name)) return name;
  if (const OtherName* other = find_in(other_sections(), name)) return std::string(other->here);
  return close_name(name, config_sections()).value_or("");
}

/// `lora.r` is known as lora_r, `scheduler.type` as lr_scheduler_type; null for a key that is here
/// under that name in the section that was meant.
const OtherName* of_its_section(const std::string& section, const std::string& name) {
  if (section.empty()) return nullptr;
  const std::string meant = section_meant(section);
  if (find_key(concat(meant, ".", name)) != nullptr) return nullptr;
  const OtherName* other = find_in(other_keys(), concat(section, "_", name));
  return other == nullptr ? find_in(other_keys(), concat(meant, "_", name)) : other;
}

/// Keys of that name, in any section.
std::vector<std::string> keys_called(std::string_view name) {
  std::vector<std::string> found;
  for (const ConfigKey& key : config_keys()) {
    if (key.name == name) found.push_back(key.full_name());
  }
  return found;
}

/// Words that mean one thing in a section and another in the next: [profiling] enable is no
/// checkpoint.enable.
bool says_enough(std::string_view name) {
  constexpr auto kVague = std::to_array<std::string_view>(
      {"alpha",    "backend", "config", "decay",    "dropout", "enable",  "folder",
       "form",     "freeze",  "frozen", "interval", "master",  "mode",    "name",
       "overlap",  "passes",  "path",   "plan",     "rank",    "reshard", "rule",
       "schedule", "source",  "split",  "steps",    "targets"});
  return !std::ranges::count(kVague, name);
}

/// The key that a name stands for, if it is not far off.
std::optional<std::string> key_meant(const std::string& section, const std::string& name) {
  const std::string meant = section_meant(section);
  if (std::string exact = concat(meant, ".", name); find_key(exact) != nullptr) return exact;
  const auto same = keys_called(name);
  if (same.size() == 1 && says_enough(name)) return same.front();
  if (section.empty()) return close_key(name);
  std::vector<std::string> names;
  for (const ConfigKey& key : config_keys()) {
    if (key.section == meant) names.push_back(key.name);
  }
  const auto close = close_name(name, names);
  return meant.empty() || !close ? std::nullopt : std::optional(concat(meant, ".", *close));
}

}  // namespace

std::span<const OtherName> other_keys() { return kOtherKeys; }
std::span<const OtherName> other_sections() { return kOtherSections; }

std::optional<std::string> close_key(std::string_view name) {
  std::vector<std::string> names;
  for (const ConfigKey& key : config_keys()) names.push_back(key.name);
  const auto close = close_name(plain(name), names);
  return close ? std::optional(keys_called(*close).front()) : std::nullopt;
}

const OtherName* find_other_key(std::string_view name) {
  return find_in(other_keys(), plain(name));
}

std::string advice_on(const OtherName& other, KeysIn where) {
  if (other.here.empty()) return concat("; it is no key here: ", other.note);
  return concat("; it is called ", shown_key(other.here, where), " here",
                other.note.empty() ? "" : " (", other.note, other.note.empty() ? "" : ")");
}

std::string advice_on_key(std::string_view full_name, KeysIn where) {
  const auto [section, name] = split(full_name);
  const OtherName* other = find_in(other_keys(), concat(section, ".", name));
  if (other == nullptr) other = find_in(other_keys(), name);
  if (other == nullptr) other = of_its_section(section, name);
  if (other != nullptr) return advice_on(*other, where);
  const auto same = keys_called(name);
  if (section.empty() && !same.empty()) {
    std::string keys;
    for (const std::string& key : same) {
      keys += concat(keys.empty() ? "" : ", ", shown_key(key, where));
    }
    return concat(", expected a key with its section: ", keys);
  }
  if (const auto key = key_meant(section, name)) {
    return concat("; the nearest is ", shown_key(*key, where));
  }
  other = find_in(other_sections(), section);
  if (other != nullptr && other->here.empty()) return advice_on(*other, where);
  const std::string meant = section_meant(section);
  if (meant.empty()) return "; there is none like it, tessera --help-keys lists all";
  return concat("; there is none like it, tessera --help-keys ", meant, " lists those of [", meant,
                "]");
}

std::string advice_on_section(std::string_view name) {
  const OtherName* other = find_in(other_sections(), plain(name));
  if (other != nullptr && !other->here.empty())
    return concat("; it is called [", other->here, "] here");
  if (other == nullptr) other = find_other_key(name);
  if (other != nullptr) return advice_on(*other, KeysIn::kFile);
  if (const auto close = close_name(plain(name), config_sections())) {
    return concat("; the nearest is [", *close, "]");
  }
  return concat(", expected one of ", tessera::joined(config_sections()));
}

}  // namespace tessera::train
