/* Marks what the shared library exports. C and C++. Who links the objects themselves defines FLASH_ATTN_STATIC. */
#ifndef FLASH_ATTN_EXPORT_H
#define FLASH_ATTN_EXPORT_H

#if defined(_WIN32) && defined(FLASH_ATTN_STATIC)
#define FLASH_ATTN_API
#elif defined(_WIN32)
#if defined(FLASH_ATTN_BUILDING)
#define FLASH_ATTN_API __declspec(dllexport)
#else
#define FLASH_ATTN_API __declspec(dllimport)
#endif
#else
#define FLASH_ATTN_API __attribute__((visibility("default")))
#endif

#endif
