#include <array>
#include <iostream>
#include <optional>

#include "base/text/printable.h"
#include "cli/arguments.h"
#include "cli/program_end.h"
#include "io/atomic_file.h"
#include "io/checkpoint_manifest.h"
#include "io/checkpoint_store.h"
#include "tessera/error.h"
#include "train/config/config_resolve.h"
#include "train/hf/hf_export.h"
#include "train/hf/turn_ends.h"
#include "train/hf/verify_export.h"
#include "train/hf/whole_export.h"

namespace tessera::cli {
namespace {

namespace fs = std::filesystem;

train::ExportOptions export_options(const ConvertArguments& arguments) {
  train::ExportOptions options;
  const auto dtype = parse_dtype(arguments.dtype);
  TESSERA_CHECK(arguments.dtype == "auto" || dtype == DType::kFloat32 || dtype == DType::kBFloat16,
                ErrorKind::kUsage, "--dtype: found ", printable(arguments.dtype),
                ", expected auto, float32 or bfloat16");
  options.dtype = dtype;
  if (arguments.max_shard_size) {
    options.max_shard_bytes = parse_byte_size(*arguments.max_shard_size, "--max-shard-size");
  }
  return options;
}

train::ModelConfig model_of(const ConvertArguments& arguments) {
  train::Config config;
  for (const auto& [key, value] : arguments.overrides) {
    TESSERA_CHECK(key == "model.allow_unknown_config_keys", ErrorKind::kUsage, "--", key,
                  ": found with convert, expected only --model.allow_unknown_config_keys there");
  }
  apply(arguments.overrides, config);
  config.model.path = train::newest_checkpoint(arguments.source, "CHECKPOINT");
  return config.model;
}

/// It would be removed with the checkpoint, by its run or by hand; or replaced by a later one, and
/// until then be taken for one that is not whole.
void require_outside_checkpoints(const std::filesystem::path& out) {
  TESSERA_CHECK(!out.empty(), ErrorKind::kUsage, "OUT: found an empty name, expected a folder");
  std::error_code failed;
  const fs::path whole = fs::weakly_canonical(fs::absolute(out), failed);
  TESSERA_CHECK(!failed, ErrorKind::kIo, "cannot reach ", shown(out), ": ", failed.message());
  for (fs::path up = whole; up != up.root_path(); up = up.parent_path()) {
    const bool is_checkpoint =
        fs::exists(up / kManifestFile, failed) && fs::exists(up / "config.json", failed);
    TESSERA_CHECK(!is_checkpoint, ErrorKind::kUsage, "OUT: found ", shown(out),
                  " inside the checkpoint ", shown(up), ", expected a folder outside of it");
    const fs::path above = up.parent_path();
    TESSERA_CHECK(
        !CheckpointStore::takes(up.filename().native()) || !CheckpointStore(above).is_of_a_run(),
        ErrorKind::kUsage, "OUT: found ", shown(up),
        ", a name that a run gives its checkpoints in ", shown(above),
        ": saving that step would replace it, and a resume would stop at it; expected "
        "another name or a folder elsewhere, as ",
        shown(above.parent_path() / concat("converted-", up.filename().native())));
  }
}

void say_what_was_not_there(const train::ModelSource& source) {
  std::error_code ignored;
  if (source.origin.empty() || std::filesystem::is_directory(source.origin, ignored)) return;
  std::cerr << "tessera: convert: " << shown(source.origin)
            << ", where training began, is no longer there: no tokenizer files are copied\n";
}

/// Which values are rounded, where the dtype that is written does not say so.
void say_what_is_rounded(const train::ExportPlan& plan) {
  if (plan.widened.empty()) return;
  std::cerr << "tessera: convert: warning: " << plan.widened.size() << " tensor(s), "
            << printable(plan.widened.front(), 256)
            << " first, were rounded to fewer bits than the dtype that they are written in: the run"
               " had a narrower precision.storage_dtype, or froze them whole on every rank"
               " (\"replicate\"); the folder that training began with has their digits\n";
}

/// Which values other programs will not have.
void say_what_is_left_out(const train::ExportPlan& plan) {
  if (plan.left_out.empty()) return;
  std::cerr << "tessera: convert: warning: " << plan.left_out.size() << " tensor(s), "
            << printable(plan.left_out.front(), 256)
            << " first, are left out: the biases by which this run evened out the load of experts"
               " (model.load_balance_coeff), for which the family has no place; readers of the"
               " folder choose some experts otherwise\n";
}

/// Warns of ends of turns that the model was trained on and that generation does not stop at.
void say_which_turns_go_on(const train::ModelSource& source, const fs::path& written) {
  std::error_code ignored;
  if (source.origin.empty() || !fs::is_directory(source.origin, ignored)) return;
  try {
    const train::TextEnds ends = train::text_ends(source.origin, source.spec);
    std::vector<std::int64_t> all = ends.ids;
    for (const train::TurnEnd& turn : train::turns_that_go_on(source.origin, ends)) {
      if (!turn.id) {
        std::cerr << "tessera: convert: warning: " << turn.says << " in " << shown(source.origin)
                  << " is " << printable(turn.token)
                  << ", which is no token of its tokenizer: generation does not stop at it; write a"
                     " token that the tokenizer has\n";
        continue;
      }
      all.push_back(*turn.id);
      std::cerr << "tessera: convert: warning: a turn ends with " << printable(turn.token)
                << " (token " << *turn.id << "; " << turn.says << " in " << shown(source.origin)
                << "), but eos_token_id is " << (ends.ids.empty() ? "not there" : joined(ends.ids))
                << " (" << ends.file
                << "): a model that was tuned on such turns does not stop at the end of its answer;"
                   " write \"eos_token_id\": ["
                << joined(all) << "] into generation_config.json of " << shown(written) << '\n';
    }
  } catch (const Error& error) {
    std::cerr << "tessera: convert: warning: whether generation stops at the end of a turn is not"
                 " known: "
              << error.what() << '\n';
  }
}

bool is_filled_folder(const std::filesystem::path& path) {
  std::error_code ignored;
  return std::filesystem::is_directory(path, ignored) &&
         !std::filesystem::is_empty(path, ignored) && !ignored;
}

/// An exit code where it failed.
std::optional<int> write_folder(const train::ExportPlan& plan, const std::string& path) {
  AtomicFolder out = train::open_as("OUT", [&] { return AtomicFolder(path); });
  try {
    train::write_export(plan, out.temporary());
    out.commit();
  } catch (const std::exception& error) {
    return report(error, Phase::kStepping);
  }
  std::size_t tensors = 0;
  for (const HfShard& shard : plan.shards) tensors += shard.tensors.size();
  std::cout << path << ": " << tensors << " tensors, " << plan.size_bytes << " bytes in "
            << plan.shards.size() << " file(s), " << plan.copies.size()
            << " tokenizer file(s) copied\n";
  return {};
}

/// A line a tensor, and how many there are of each kind, and of the source's in none.
int verify_folder(const train::ExportPlan& plan, const std::string& path, std::size_t left_out) {
  const auto tensors = train::open_as("OUT", [&] { return train::compare_export(plan, path); });
  using train::Comparison;
  constexpr std::array kKinds{Comparison::kEqual, Comparison::kCast, Comparison::kChanged};
  std::array<std::int64_t, kKinds.size()> counts{};
  for (const train::ComparedTensor& tensor : tensors) {
    std::cout << printable(tensor.name, 1024) << ": " << to_string(tensor.comparison) << ", "
              << tensor.says << '\n';
    ++counts.at(static_cast<std::size_t>(tensor.comparison));
  }
  std::cout << path << ":";
  for (const Comparison kind : kKinds) {
    std::cout << (kind == kKinds.front() ? " " : ", ") << counts.at(static_cast<std::size_t>(kind))
              << ' ' << to_string(kind);
  }
  if (left_out > 0) std::cout << "; " << left_out << " of the source left out";
  std::cout << '\n';
  return counts.back() == 0 ? kDone : kFoundProblems;
}

}  // namespace

int run_convert(const ConvertArguments& arguments) {
  const train::ExportOptions options = export_options(arguments);
  train::open_as("OUT", [&] { require_outside_checkpoints(arguments.out); });
  const train::ModelConfig model = model_of(arguments);
  const train::ModelSource source = train::open_as(
      "CHECKPOINT", [&] { return train::open_model(model, {}, train::Purpose::kInference); });
  TESSERA_CHECK(source.adapters || !arguments.merged, ErrorKind::kUsage, "--merged: found ",
                printable(arguments.source, 1024),
                ", expected a checkpoint of adapters (lora.rank)");
  const bool adapters = source.adapters && !arguments.merged;
  TESSERA_CHECK(!adapters || !arguments.max_shard_size, ErrorKind::kUsage,
                "--max-shard-size: found ", printable(arguments.max_shard_size.value_or("")),
                " for a checkpoint of adapters, expected none: peft reads them from one file; "
                "leave it out, or write the whole model with --merged");
  TESSERA_CHECK(!adapters || !arguments.whole, ErrorKind::kUsage, "--whole: found ",
                printable(arguments.source, 1024),
                ", a checkpoint of adapters, expected a model; add --merged");
  train::ExportPlan plan =
      adapters ? train::plan_adapter_export(source, options) : train::plan_export(source, options);
  if (arguments.whole) plan = train::with_the_rest(std::move(plan), source, options);
  if (!adapters) say_what_was_not_there(source);
  say_what_is_rounded(plan);
  say_what_is_left_out(plan);
  say_which_turns_go_on(source, adapters ? source.origin : fs::path(arguments.out));
  if (!arguments.verify || !is_filled_folder(arguments.out)) {
    if (const auto failed = write_folder(plan, arguments.out)) return *failed;
  }
  return arguments.verify
             ? verify_folder(plan, arguments.out, arguments.whole ? 0 : source.left_out.size())
             : kDone;
}

}  // namespace tessera::cli
