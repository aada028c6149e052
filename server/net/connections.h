// This header finds the TCP connections of a library that keeps its descriptors to itself, and ends
// them.
#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <optional>
#include <string>

namespace thalweg {

// Returns the port of the socket's own end, or 0 when the descriptor is no socket of TCP.
int LocalPort(int fd);

// Returns an address of TCP, as gRPC writes it without its kind: 10.0.0.1:70 or %5B::1%5D:70; empty
// for any other.
std::string TextOf(const sockaddr_storage& address);

// Returns the other end of a connection in this form; empty when the descriptor is no connection of
// TCP.
std::string PeerOf(int fd);

// Returns a number that tells a socket from all others of this boot, also those that get its
// descriptor later; 0 if the descriptor is no open socket.
uint64_t CookieOf(int fd);

// Returns how many bytes the process has read from a connection of TCP; nullopt when it is none.
std::optional<uint64_t> BytesRead(int fd);

// Ends the connection, whose descriptor somebody else keeps and closes, and drops what has arrived.
// Returns false, and does nothing, if the descriptor is not the one with this cookie any more.
bool EndConnection(int fd, uint64_t cookie);

}  // namespace thalweg
