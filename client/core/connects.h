// Lets a process end its own calls of Session::Connect, which wait for other workers.
#pragma once

#include <cstdint>

namespace thalweg {

// Thread-safe. Ends the calls that wait now with Cancelled; later ones are not concerned.
void CancelConnects();
// Returns how often CancelConnects has been called.
uint64_t CancelledConnects();

}  // namespace thalweg
