// The data that a run is trained on, as a value: a resumed run continues with the same rows. Pure.
//
// Names do not count, data may have moved; sizes and content do. Large files are looked at in
// parts.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "io/checkpoint_manifest.h"
#include "train/config/config.h"

namespace tessera::train {

/// A file up to this size is hashed whole; several files of tokens share it. Of a larger one
/// kSamples parts of kSampleBytes, its beginning and end among them, the others at equal distances
/// and on pages of a file.
inline constexpr std::int64_t kHashedWholeBytes = std::int64_t{64} << 20;
inline constexpr std::int64_t kSamples = 64;
inline constexpr std::int64_t kSampleBytes = 4096;

/// The identity of data.path or [[data.source]], without patterns (data_files.h). Weights count.
/// Reads the files. Errors: kIo, kFormat for files that are not there.
CheckpointData data_identity(const DataConfig& data, std::int64_t seq_len,
                             std::int64_t global_batch_size);

/// training.global_batch_size of a run that resumes: where it is -1, the rows of a step of the
/// checkpoint, so that any number of ranks that divides them makes the same steps. Batches that are
/// given (X.safetensors) have their own number. Errors: kConfig where they are no multiple of
/// local_batch_size x `data_ranks`.
std::int64_t resumed_global_batch_size(const Config& config, int data_ranks,
                                       const CheckpointData& before, const std::string& checkpoint);

/// How each refusal ends of a run that resumes and is not as it was.
inline constexpr auto kSetBack = "; set it back, or start a new run in another folder";

/// Names the key of `now` that has to be reset to give the data `expected`, and its value: packing,
/// or the weights, contents and number of sources, compared with `before`, the config of the
/// earlier run. None where no such key explains the difference. Reads the files.
std::optional<std::string> key_that_changed(const DataConfig& now,
                                            const std::optional<DataConfig>& before,
                                            const CheckpointData& expected);

/// Errors: kConfig where `found` gives other rows than `expected`, the data of a checkpoint; names
/// the key, and for `key`, which names the data, the difference.
void require_same_data(const CheckpointData& found, const CheckpointData& expected,
                       const std::string& checkpoint, std::string_view key = "data.path");

}  // namespace tessera::train
