#include "tessera/contract.h"

#include <limits>

#include "base/hash.h"
#include "base/wildcard.h"
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

void add_names(Hasher& hasher, const std::vector<std::string>& names) {
  hasher.add(std::uint64_t{names.size()});
  for (const std::string& name : names) hasher.add(std::string_view(name));
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
    case ContractField::kCount:
      break;
  }
  return "unknown";
}

std::int64_t ParameterMeta::numel() const { return product(shape, name); }
std::int64_t GradContract::numel() const { return product(shape, name); }

bool matches_name(std::string_view pattern, std::string_view name) {
  return dotted_match(pattern, name);
}

std::uint64_t hash(const std::vector<GradContract>& contracts) {
  // By name, so that the number does not hang on the order of the enumerators.
  const auto add_dtype = [](Hasher& hasher, DType dtype) { hasher.add(to_string(dtype)); };
  Hasher hasher;
  hasher.add(std::string_view("contract 1")).add(std::uint64_t{contracts.size()});
  for (const GradContract& contract : contracts) {
    hasher.add(std::string_view(contract.name)).add(std::uint64_t{contract.shape.size()});
    for (const std::int64_t size : contract.shape) hasher.add(size);
    add_dtype(hasher, contract.storage.dtype);
    add_dtype(hasher, contract.compute.dtype);
    hasher.add(contract.grad ? to_string(*contract.grad) : std::string_view());
    add_dtype(hasher, contract.accumulate);
    add_dtype(hasher, contract.reduce);
    add_dtype(hasher, contract.final);
    hasher.add(contract.trainable).add(contract.raw_sum_by_autograd);
    add_names(hasher, contract.reductions.shard_axes);
    add_names(hasher, contract.reductions.replica_axes);
    hasher.add(contract.reductions.divide_factor);
    add_names(hasher, contract.aliases);
  }
  return hasher.digest();
}

}  // namespace tessera
