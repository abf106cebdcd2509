// Every value of a contract once, as text by its name: what is hashed, compared between ranks and
// shown as the first difference. A field that is not listed here is in no hash.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "tessera/model_contract.h"

namespace tessera::grad {

struct FieldText {
  std::string_view field;
  std::string value;
};

/// The name comes first. Different values give different texts; reasons are left out.
std::vector<FieldText> fields_of(const GradContract& contract);
std::vector<FieldText> fields_of(const BufferContract& contract);
std::vector<FieldText> fields_of(const UnitContract& contract);

}  // namespace tessera::grad
