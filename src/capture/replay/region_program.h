// Program: a tape made ready to run again without autograd, in memory that is laid out in advance.
//
// Each operation writes where its value lies: by its `.out` form, where ATen has one that does not
// copy; a kernel of this library into memory that is given to it (kernels/results.h); else the
// result is copied there. Views need no operation: a value is made once. Memory that forward leaves
// for backward lies in the block of an entry, one for each forward whose backward is to come; all
// other memory lies in a scratch block, which regions share, since they run one after the other.
// Results and gradients of arguments, which autograd gets, have fresh memory in each call: a replay
// that wrote there again would change what others hold. A product that is only a parameter's
// gradient names the slot, which is shared with it where possible. [Note: direct slots] of
// grad/sink.h. Next: live_entry.h.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "capture/replay/arena_plan.h"
#include "capture/replay/tape.h"

namespace tessera::capture {

enum class MemoryPlace : std::uint8_t {
  kNowhere,  ///< not needed
  kEntry,
  kScratch,
  kGiven,    ///< argument or gradient: as it comes
  kHanded,   ///< result or gradient of an argument: fresh in each call
  kOutside,  ///< where it is
};

struct ProgramMemory {
  MemoryPlace place = MemoryPlace::kNowhere;
  std::int64_t bytes = 0;
  std::int64_t offset = 0;      ///< in its block
  std::int64_t first_byte = 0;  ///< of kGiven: the byte at which the given tensor begins
  std::int32_t number = kNone;  ///< of kGiven and kHanded: its number
  std::optional<WeakStorage> outside = {};
};

struct ProgramCall {
  enum class Form : std::uint8_t {
    kNothing,  ///< it only allocates
    kPlain,    ///< its arguments say where it writes
    kResults,  ///< into the memory that it is given
    kCopied,   ///< its results are copied to where they lie
  };
  c10::OperatorHandle operation;
  Form form = Form::kPlain;
  std::vector<Slot> arguments;
  std::vector<ValueId> made;  ///< of kResults and kCopied, in the order of the results' tensors;
                              ///< kNone: a result that lies elsewhere
  std::optional<TapeGradient> direct;  ///< whose slot may take the place of the last argument
  std::size_t gradient_step = 0;       ///< of `direct`: where it would be handed in
  bool on_one_thread = false;          ///< whether it was recorded so
};

struct ProgramStep {
  std::optional<ProgramCall> call;  ///< none: a gradient
  TapeGradient gradient = {};
};

/// A value that leaves the program: in memory of its own, fresh in each call; a view of a given
/// value or of another one; or else a clone.
struct HandedValue {
  ValueId value = kNone;  ///< kNone: undefined
  bool is_fresh = false;
  std::int32_t given = kNone;    ///< of results an input, of gradients of inputs one that came
  std::int32_t same_as = kNone;  ///< fresh, and handed out with this one
};

struct Program {
  std::vector<Value> values;
  std::vector<ProgramMemory> memories;
  std::vector<ProgramStep> steps;
  std::size_t forward_steps = 0;
  std::vector<ValueId> inputs, gradients;  ///< kNone: undefined, or not used
  std::vector<HandedValue> results, input_gradients;
  bool defers = false;  ///< some gradients were deferred
  /// Recorded while weight gradients are deferred, whether or not it has any that can be.
  bool while_deferring = false;
  std::int64_t entry_bytes = 0, scratch_bytes = 0;
  /// Arguments and results that backward reads: they may not change in between.
  std::vector<std::int32_t> kept_inputs, kept_results;
  std::vector<MemoryId> kept_outside;  ///< the same of memory from outside
};

/// The values that enter and leave a tape.
struct TapeEnds {
  std::vector<ValueId> inputs, results, gradients, input_gradients;
  std::size_t arguments = 0;  ///< of the inputs; those behind them keep() took out of a checkpoint
  bool operator==(const TapeEnds&) const = default;
};

/// Returns that value as it lies in `storage`.
at::Tensor tensor_of(const c10::Storage& storage, const Value& value);

/// Makes `program`, or returns why there is none. Errors: kInternal where memory is laid out wrong.
std::string make_program(const Tape& tape, const TapeEnds& ends, Program& program);

}  // namespace tessera::capture
