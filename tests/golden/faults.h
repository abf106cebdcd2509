// The list of injected faults. Next: faulty_run.h, docs/layouts.md.
#pragma once

#include <iosfwd>
#include <string>
#include <vector>

#include "golden/faulty_run.h"

namespace tessera::golden {

// The folders in which most faults are injected.
inline constexpr const char* kQwen = "qwen3-moe-fp32";
inline constexpr const char* kGptOss = "gpt-oss-fp32";
inline constexpr const char* kDeepseek = "deepseek-v2-fp32";
inline constexpr const char* kSigmoid = "deepseek-v3-fp32";
inline constexpr const char* kLlama4 = "llama4-text-fp32";
inline constexpr const char* kGemma = "gemma4-fp32";
inline constexpr const char* kHybrid = "qwen3-next-fp32";
inline constexpr const char* kMamba = "nemotron-h-fp32";
inline constexpr const char* kDense = "llama-fp32";
inline constexpr const char* kWindows = "mistral-fp32";
inline constexpr const char* kLearned = "gpt2-fp32";  ///< learned positions, all heads have keys

enum class CaughtBy : std::uint8_t {
  kSharding,    ///< refused when the model is sharded, naming the parameter
  kTransition,  ///< refused in the first forward, by the shape of a part
  kStep,        ///< refused in the step, by what ranks say of their rows
  kInvariance,  ///< check_invariant_gradients, on the first step
  kGradients,   ///< the comparison with the unsharded model alone
  kNorm,        ///< the same of the gradient norm; every gradient is right
  kBias,        ///< the same of the biases that balance the experts; every gradient is right
  kNothing,     ///< does no harm here
};

/// The settings of a run that are no fault: the sound run that it is compared with has them, too.
enum class Setting : std::uint8_t {
  kPlain,
  kAuxiliaryLoss,
  kScoresBefore,
  kBalance,        ///< the bias on the choice of experts
  kBalanceByRows,  ///< the same, a micro-batch a row
  kAdapters,       ///< of kQwen's experts, trained a little, on the frozen model
  kPacked,         ///< rows of several documents
  kRouting,        ///< experts that the batch brings
  kDropout,        ///< of the inputs of kDense's adapters
};
/// The first call with kAdapters trains them, with threads as ranks: it may not run on a rank's
/// thread.
void set_up(train::Config& config, Setting setting);
/// The same of its batch, in Changes::batch; empty where the batch is the folder's.
std::function<void(train::MicroBatch&)> batch_of(Setting setting);

struct Fault {
  std::string test;  ///< its name
  std::string what;
  std::string seen;  ///< where somebody had it
  std::string folder;
  Degrees degrees;
  Changes changes;
  CaughtBy caught_by = CaughtBy::kGradients;
  std::string named;  ///< in the refusal, or part of a name that is found
  Setting setting = Setting::kPlain;
  bool losses_are_right = false;  ///< of the step itself: the fault is in backward alone
  int number = 0;                 ///< of faults of context parallelism
};
/// Its line of docs/layouts.md, of faults with a number of docs/context.md.
std::string table_row(const Fault& fault);
std::ostream& operator<<(std::ostream& out, const Fault& fault);

/// A layout without its fault.
struct Ground {
  std::string folder;
  Setting setting = Setting::kPlain;
  Degrees degrees;
};
std::string to_string(const Ground& ground);
std::ostream& operator<<(std::ostream& out, const Ground& ground);
/// The grounds of these faults, each once.
std::vector<Ground> grounds_of(const std::vector<Fault>& faults);

const std::vector<Fault>& all_faults();
/// Those of context parallelism, whose table is in docs/context.md.
std::vector<Fault> faults_of_context();
/// The lines of that table for faults that have tests of their own: context_faults_test.cpp,
/// ../dist/context_attention_test.cpp.
std::vector<std::string> other_rows_of_context();
// Parts of all_faults(), by what is wrong.
std::vector<Fault> faults_of_declarations();
std::vector<Fault> faults_of_transitions();
std::vector<Fault> faults_of_sums();
std::vector<Fault> faults_of_counts();
std::vector<Fault> faults_of_losses();
std::vector<Fault> faults_of_scores();
std::vector<Fault> faults_of_states();

}  // namespace tessera::golden
