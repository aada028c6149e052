// This header finds the TCP connections of a library that keeps its descriptors to itself, and ends
// them.
#pragma once

#include <cstdint>

namespace thalweg {

// Returns the port of the socket's own end, or 0 when the descriptor is no socket of TCP.
int LocalPort(int fd);

// Returns a number that tells a socket from all others of this boot, also those that get its
// descriptor later; 0 if the descriptor is no open socket.
uint64_t CookieOf(int fd);

// Ends the connection, whose descriptor somebody else keeps and closes, and drops what has arrived.
// Returns false, and does nothing, if the descriptor is not the one with this cookie any more.
bool EndConnection(int fd, uint64_t cookie);

}  // namespace thalweg
