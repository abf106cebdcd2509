// The table names options of other verbs and programs with the option that this program has
// instead. Next: train/config/config_names.h, which does so for keys.
#pragma once

#include <string_view>
#include <vector>

namespace tessera::cli {

/// Options of other verbs and programs for what this verb may call otherwise.
struct OtherOption {
  std::vector<std::string_view> theirs;
  std::vector<std::string_view> here;  ///< options or keys; the first that the verb takes is meant
};

/// The first row is of the number of ranks.
inline const std::vector<OtherOption>& other_options() {
  static const std::vector<OtherOption> all{
      {{"nproc",      "nprocs",        "num_proc",   "n_proc",   "nproc_per_node", "np",
        "n",          "ranks",         "num_ranks",  "nranks",   "n_ranks",        "world",
        "world_size", "num_processes", "processes",  "num_gpus", "n_gpus",         "ngpus",
        "gpus",       "gpus_per_node", "num_devices"},
       {"--nproc", "--world", "--ranks"}},
      {{"gpu_memory", "memory", "max_memory", "hbm", "vram"}, {"--device-memory"}},
      {{"microbatches", "num_microbatches", "num_micro_batches", "n_microbatches"},
       {"--micro-batches"}},
      {{"output", "output_file", "out_file", "o"}, {"--out"}},
      {{"max_tokens", "max_length", "num_tokens"}, {"--max-new-tokens"}},
      {{"model", "m", "model_path", "model_name_or_path", "ckpt"}, {"--model", "--model.path"}}};
  return all;
}

}  // namespace tessera::cli
