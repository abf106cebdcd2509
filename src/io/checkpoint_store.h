// CheckpointStore: the folder of a run's checkpoints: which are complete, which one is the latest,
// how one becomes complete and how old ones are removed.
//
// A checkpoint is complete when its folder has its final name, step-N; until then it is step-N.tmp.
// A crash at any moment leaves complete checkpoints, perhaps a folder that ends in .tmp, and a
// `latest` that names a complete one. The store handles folders, not tensors: those are in
// checkpoint_folder.h.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

inline constexpr std::string_view kLatestFile = "latest";

/// "step-12".
std::string step_folder(std::int64_t step);
/// The inverse; none for anything else.
std::optional<std::int64_t> parse_step_folder(std::string_view name);

class CheckpointStore {
 public:
  explicit CheckpointStore(std::filesystem::path folder) : folder_(std::move(folder)) {}

  /// Whether a run gives this name in its folder of checkpoints, so that it replaces or removes
  /// what is there; true also for names that the run may take for unfinished checkpoints.
  static bool takes(std::string_view name);
  /// Whether a run keeps its checkpoints here, as far as the folder tells: it has a `latest`, a
  /// checkpoint, or the lock of a run that has not saved yet.
  bool is_of_a_run() const;

  const std::filesystem::path& folder() const { return folder_; }
  std::filesystem::path complete(std::int64_t step) const;   ///< FOLDER/step-N
  std::filesystem::path temporary(std::int64_t step) const;  ///< FOLDER/step-N.tmp

  /// The complete ones, ascending; none where there is no folder yet. Errors: kIo.
  std::vector<std::int64_t> steps() const;
  /// Returns the step that the file `latest` names; the newest complete one where there is no such
  /// file (a crash before the first was written). Errors: kFormat for a text that is not step-N,
  /// and where that folder is missing; kIo.
  std::optional<std::int64_t> latest() const;

  /// Makes the folder and removes what a crash left unfinished; restores a complete step that
  /// finish() was replacing. Errors: kIo.
  void clean() const;
  /// Makes step-N.tmp, or uses the folder that is there. Errors: kIo, also for a link.
  void begin(std::int64_t step) const;
  /// Removes step-N.tmp; never throws, since it cleans up after an error.
  void discard(std::int64_t step) const noexcept;
  /// Gives step-N.tmp its final name, durably. A folder of that name from another attempt is
  /// replaced; it stays whole until then, also after a crash or an error. Errors: kIo.
  void finish(std::int64_t step) const;
  void set_latest(std::int64_t step) const;  ///< Errors: kIo.
  /// Removes complete checkpoints older than the newest `count` up to `step` (0: none). Later ones
  /// stay: they belong to another attempt or to the user. Errors: kIo.
  void keep(std::int64_t count, std::int64_t step) const;

 private:
  std::filesystem::path folder_;
};

}  // namespace tessera
