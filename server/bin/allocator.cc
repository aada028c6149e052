// The programs' allocator is jemalloc, which reads its settings here; MALLOC_CONF in the
// environment takes precedence.
//
// Every job has threads of its own, and what one thread has allocated another frees. glibc keeps
// freed memory for the threads that had it, so a process that has served many jobs grows. jemalloc
// keeps free pages for a tenth of a second, in which an exchange needs them again, and then
// returns them. One thread beside the others does that, also when no job runs.

extern "C" {
__attribute__((visibility("default"))) extern const char* const malloc_conf;
const char* const malloc_conf =
    "background_thread:true,max_background_threads:1,dirty_decay_ms:100";
}
