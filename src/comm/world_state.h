// What a World keeps besides its place: groups and the mark that it has failed. Private to comm/.
#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <string>

#include "base/mutex.h"
#include "comm/group.h"
#include "launch/poison.h"
#include "launch/store.h"
#include "launch/wait_board.h"
#include "tessera/world.h"

namespace tessera {

struct World::State {
  base::Mutex mutex;
  std::map<std::string, std::shared_ptr<comm::Group>> made TESSERA_GUARDED_BY(mutex);
  const std::shared_ptr<comm::Poison> poison = std::make_shared<comm::Poison>();
  const std::shared_ptr<comm::WaitBoard> board = std::make_shared<comm::WaitBoard>();
  std::shared_ptr<comm::Store> store;  ///< none in a world of one
  std::chrono::milliseconds init_timeout{0};
  std::unique_ptr<comm::StartUpLog> start_up_log;  ///< of rank 0, in a start-up
};

}  // namespace tessera
