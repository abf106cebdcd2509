// The whole contract as bytes for a hash and as lines for a comparison; resolve_model.cpp makes it.
#include "tessera/model_contract.h"

#include "base/hash.h"
#include "base/printable.h"
#include "base/unit_label.h"
#include "grad/contract_fields.h"
#include "tessera/error.h"

namespace tessera {
namespace {

template <class Contract>
void add(Hasher& hasher, std::string_view kind, const std::vector<Contract>& contracts) {
  hasher.add(kind).add(std::uint64_t{contracts.size()});
  for (const Contract& contract : contracts) {
    for (const auto& [field, value] : grad::fields_of(contract)) {
      hasher.add(field).add(std::string_view(value));
    }
  }
}

/// Names come from modules and files: a line break in one would make two lines.
std::string shown(const std::string& name) {
  const std::string quoted = printable(name, name.size());
  return quoted.substr(1, quoted.size() - 2);
}

template <class Contract>
void add_lines(std::string& lines, std::string_view kind, const std::vector<Contract>& contracts) {
  for (const Contract& contract : contracts) {
    const auto fields = grad::fields_of(contract);
    const std::string whose = concat(kind, " ", unit_label(contract.name));
    for (std::size_t i = 1; i < fields.size(); ++i) {
      lines += shown(concat(whose, " ", fields[i].field, " ", fields[i].value)) + "\n";
    }
  }
}

}  // namespace

std::uint64_t hash(const std::vector<GradContract>& contracts) {
  Hasher hasher;
  hasher.add(std::string_view("contract 2"));
  add(hasher, "parameters", contracts);
  return hasher.digest();
}

std::uint64_t hash(const ModelContract& contract) {
  Hasher hasher;
  hasher.add(std::string_view("model contract 2"));
  add(hasher, "parameters", contract.parameters);
  add(hasher, "buffers", contract.buffers);
  add(hasher, "units", contract.units);
  return hasher.digest();
}

std::string to_lines(const ModelContract& contract) {
  std::string lines;
  add_lines(lines, "parameter", contract.parameters);
  add_lines(lines, "buffer", contract.buffers);
  add_lines(lines, "unit", contract.units);
  return lines;
}

}  // namespace tessera
