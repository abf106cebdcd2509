// The precompiled header of the tests that see libtorch.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "torch_pch.h"
