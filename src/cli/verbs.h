// The verbs of the program, one file each. Each returns the exit code or throws what main()
// reports.
#pragma once

#include "cli/arguments.h"

namespace tessera::cli {

int run_train(const TrainArguments& arguments);
int run_gradients(const GradientsArguments& arguments);
int run_inspect(const InspectArguments& arguments);
/// The half of it that is about a run (inspect_contract.cpp).
void inspect_contract(const InspectArguments& arguments);
int run_generate(const GenerateArguments& arguments);
int run_convert(const ConvertArguments& arguments);

}  // namespace tessera::cli
