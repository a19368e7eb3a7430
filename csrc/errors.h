// Exceptions of the native core. bindings/module.cpp translates GroupError to the Python class FusedTPError, and each
// of the others to the class of the same name.
#pragma once

#include <stdexcept>
#include <string>

namespace fused_tp {

struct GroupError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct CollectiveTimeoutError : GroupError {
  using GroupError::GroupError;
};

struct PeerLostError : GroupError {
  using GroupError::GroupError;
};

struct RankMismatchError : GroupError {
  using GroupError::GroupError;
};

}  // namespace fused_tp
