// 50 steps on real text, and how far apart two runs may be that differ in rounding alone.
//
// data/emma.txt is the beginning of Jane Austen's Emma, of which scripts/corpus makes the text of
// ./run; bytes are tokens. What rounding does to the weights it does to the losses, more with every
// step: the spread of runs whose weights were moved by one ulp is the measure, at each step the
// largest so far (and at least what two losses differ by if they differ at all).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "golden/model_folder.h"

namespace tessera::golden {

inline constexpr std::int64_t kTextSteps = 50;
inline constexpr std::int64_t kTextRows = 4;  ///< of a batch

/// Stores values of fp32, or of int64.
StoredTensor stored(const std::string& name, const at::Tensor& values);

/// Moves a third of the elements of every tensor in fp32 one step up, a third one step down.
std::vector<StoredTensor> moved_by_one_ulp(std::vector<StoredTensor> tensors, unsigned seed);

/// A file of the text as batches of training, rows of `tokens`, the first also as that of
/// `gradients`.
/// `vocabulary` is that of a model that may have fewer tokens than the text has bytes, which are
/// wrapped around.
std::string text_batches(std::int64_t tokens, std::int64_t vocabulary = 256);

/// The bound of a run that differs in rounding alone, in spreads.
inline constexpr double kSpreads = 3.0;

class Spread {
 public:
  /// The losses of the run that others are compared with, by step.
  Spread(std::vector<double> losses, std::int64_t tokens);
  /// Those of a run whose weights were moved.
  void add(const std::vector<double>& losses);
  /// In spreads, the largest of all steps.
  double distance(const std::vector<double>& losses) const;

 private:
  std::int64_t tokens_;
  std::vector<double> losses_, lowest_, highest_;
};

}  // namespace tessera::golden
