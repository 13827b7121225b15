// The archive of code objects as data of the library.
    .section .rodata
    .balign 16
    .globl flash_attn_code_objects
    .hidden flash_attn_code_objects
    .type flash_attn_code_objects, %object
flash_attn_code_objects:
    .incbin FLASH_ATTN_CODE_OBJECTS
    .globl flash_attn_code_objects_end
    .hidden flash_attn_code_objects_end
flash_attn_code_objects_end:
    .size flash_attn_code_objects, flash_attn_code_objects_end - flash_attn_code_objects
    .section .note.GNU-stack, "", %progbits
