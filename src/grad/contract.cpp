#include "tessera/contract.h"

#include <limits>

#include "base/text/wildcard.h"
#include "grad/enum_words.h"
#include "layout/local_part.h"
#include "tessera/error.h"

namespace tessera {
namespace {

std::int64_t product(const std::vector<std::int64_t>& shape, const std::string& name) {
  std::int64_t numel = 1;
  bool empty = false;
  for (const std::int64_t size : shape) {
    TESSERA_CHECK(size >= 0, ErrorKind::kContract, name, ": found a dimension of ", size,
                  ", expected none below 0; the model or file that declares it is broken");
    if (size == 0) {
      empty = true;  // the others may still be negative
      continue;
    }
    TESSERA_CHECK(numel <= std::numeric_limits<std::int64_t>::max() / size, ErrorKind::kContract,
                  name,
                  ": found more than 2^63 elements; the model or file that declares it is broken");
    numel *= size;
  }
  return empty ? 0 : numel;
}

}  // namespace

std::string_view to_string(ContractField field) {
  switch (field) {
    case ContractField::kStorage:
      return "storage";
    case ContractField::kCompute:
      return "compute";
    case ContractField::kGrad:
      return "grad";
    case ContractField::kAccumulate:
      return "accumulate";
    case ContractField::kReduce:
      return "reduce";
    case ContractField::kFinal:
      return "final";
    case ContractField::kTrainable:
      return "trainable";
    case ContractField::kMaster:
      return "master";
    case ContractField::kState:
      return "state";
    case ContractField::kDecay:
      return "decay";
    case ContractField::kCount:
      break;
  }
  return "unknown";
}

std::string_view to_string(Master master) {
  switch (master) {
    case Master::kNone:
      return "none";
    case Master::kStorage:
      return "storage";
    case Master::kRemainder:
      return "remainder";
    case Master::kCopy:
      break;
  }
  return "copy";
}

std::string_view to_string(FrozenAs kept) { return word_of(kept); }
std::string_view to_string(Intrinsic intrinsic) { return word_of(intrinsic); }
std::string_view to_string(NarrowerRequest what) { return word_of(what); }

std::int64_t ParameterMeta::numel() const { return product(shape, name); }
std::int64_t GradContract::numel() const { return product(shape, name); }

std::vector<std::int64_t> GradContract::local_shape() const {
  return layout.axes.empty() ? shape : layout::local_shape(layout, shape);
}

std::int64_t GradContract::local_numel() const {
  return layout.axes.empty() ? numel() : product(local_shape(), name);
}

bool matches_name(std::string_view pattern, std::string_view name) {
  return dotted_match(pattern, name);
}

}  // namespace tessera
